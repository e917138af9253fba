// The splits from a row's start on in a tree of at most NODES nodes, one token a warp. It comes
// behind merge.cuh.
//
// All slots from the first of these splits on are brought into shared memory, keys first and then
// values; each warp selects those that its token sees, in the order of its positions.

struct Pairs {
  const Block& block;
  int lane, token, row, rows, seen;
  int base;  // the first slot that is in shared memory
  bool there;
  unsigned char* path;  // where in shared memory the token's positions of a split are

  __device__ Pairs(const Block& block, int group) : block(block) {
    lane = threadIdx.x % 32;
    token = group * WARPS + threadIdx.x / 32;
    there = token < block.tokens;
    token = min(token, block.tokens - 1);
    row = block.row_of(token);
    rows = there ? block.row_of(token + 1) - row : 0;
    seen = block.seen(token);
    base = block.apart * SPLIT;
    path = block.shared.paired.near[threadIdx.x / 32];
  }

  // Ask for the slots [from, to) of the window.
  __device__ void load(const u16* cache, int from, int to) const {
    u32 buffer = shared_address(block.shared.buffers[0]);
    for (int i = from * PIECES + threadIdx.x; i < to * PIECES; i += THREADS)
      copy_all(buffer + i / PIECES * STRIDE + i % PIECES * 16, cache + (i64)base * DIM + i * 8);
  }
  __device__ int filled() const { return block.start - base; }
  __device__ int all() const { return min(block.a.kv_len, block.start + block.a.seq_len) - base; }

  // Find where the positions of a split are; those that are not seen count as the token itself.
  __device__ void find(int split) const {
    int first = split * SPLIT, most = block.a.kv_len - 1 - base;
    int self = min(filled() + block.first_token + token, most);
    const u32* mask = block.mask_of(token);
    __syncwarp();
    for (int place = lane; place < SPLIT; place += 32)
      path[place] = first + place < block.start ? first + place - base : self;
    __syncwarp();
    int before = 0;
    for (int i = 0; i < block.words(); ++i) {
      u32 word = mask[i];
      int place = block.start + before + __popc(word & ((1u << lane) - 1)) - first;
      if ((word >> lane & 1) && place >= 0 && place < SPLIT)
        path[place] = min(filled() + i * 32 + lane, most);
      before += __popc(word);
    }
    __syncwarp();
  }

  __device__ u32 address(int place) const {
    return shared_address(block.shared.buffers[0]) + path[place] * STRIDE;
  }

  __device__ void score(int query, float (&s)[8][4]) const {
    u32 queries = shared_address(block.shared.reused.queries) + query * STRIDE + lane / 16 * 16;
    u32 keys[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      keys[j] = address(j * 8 + lane % 8);
      s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < STEPS; i += 2) {
      u32 a[4], next[4];
      load_tiles(a, queries + i * 32);
      if (i + 1 < STEPS) load_tiles(next, queries + i * 32 + 32);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        u32 b[4];
        load_tiles(b, keys[j] + i * 32 + lane / 8 % (i + 1 < STEPS ? 4 : 2) * 16);
        multiply(s[j], a, b[0], b[1]);
        if (i + 1 < STEPS) multiply(s[j], next, b[2], b[3]);
      }
    }
  }

  // The sums of a split go where they are left, or into the output if there are no others.
  __device__ void weigh(const Powers& powers, int unit) const {
    u32 values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = address(i * 16 + lane % 16) + lane / 16 * 16;
    i64 first = first_partial(block) + unit * stored_rows(block) + row;
#pragma unroll
    for (int n = 0; n < STEPS; ++n) {
      float o[2][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) weigh_sixteen(powers.p[i], values[i] + n * 32, o);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int own = lane / 4 + 8 * half;
        if (own >= rows) continue;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          int column = n * 16 + k * 8 + lane % 4 * 2;
          // Zeros are those of merged sums.
          float2 sum = make_float2(__fadd_rn(o[k][2 * half], 0.0f), __fadd_rn(o[k][2 * half + 1], 0.0f));
          if (block.units > 1) {
            *(float2*)(block.a.partial + (first + own) * DIM + column) = sum;
          } else {
            float share = inverse(powers.l[half]);
            *(u32*)(output(block, block.tile * ROWS + row + own) + column) =
                pack(__fmul_rn(sum.x, share), __fmul_rn(sum.y, share));
          }
        }
        if (n == 0 && lane % 4 == 0 && block.units > 1)
          block.a.sums[first + own] = make_float2(powers.m[half], powers.l[half]);
      }
    }
  }

  __device__ void run() const {
    __syncthreads();
    load(block.keys, 0, filled());
    find(block.apart);
    wait_for_predecessors();
    __syncthreads();
    block.load_queries();
    load(block.keys, filled(), all());
    end_copies();
    for (int split = block.apart; split < block.splits; ++split) {
      if (split > block.apart) {
        find(split);
        __syncthreads();
        load(block.keys, 0, all());
        end_copies();
      }
      wait_copies<0>();
      __syncthreads();
      // Rows behind the token's own are others' and count for nothing.
      float s[8][4];
      score(min(row + lane % 16, ROWS - 1), s);
      __syncthreads();
      load(block.values, 0, all());
      end_copies();
      int of[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        of[half] = lane / 4 + 8 * half < rows ? seen - split * SPLIT : 0;
      Powers powers(s, of);
      wait_copies<0>();
      __syncthreads();
      weigh(powers, block.unit_of(split));
    }
    __syncthreads();
  }
};
