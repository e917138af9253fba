// x A B in a product of few tokens. The first blocks of its grid, on multiprocessors that have no
// rows of the product, multiply by sixteen ranks of a matrix of A each, in the order of every
// product, and tell all others. Of these the last warps add what comes of it, a tile of rows each,
// as a ninth part of the sums: before their last stage if it is told by then, or behind it. All
// blocks of the grid are on the GPU at once. It comes behind items.cuh.

#if SHRINK_STAGES
#define PASS 16
#define RANKS_BYTES (2 * EIGHT_BYTES)
#define SHRUNK_MATRICES (OUTPUT == GATED ? 2 : MATRICES)

// The ranks of A that a block takes, through a ring in place of that of the weights. Sixteen ranks of
// one matrix are a set: the first ones of all matrices, then the next ones.
struct Ranks {
  const Arguments& a;
  u32 ring;
  int rank, first, count, lane;
  int set, block = 0, slot = 0;

  __device__ __forceinline__ bool is_there(int one) const {
    return one / SHRUNK_MATRICES * PASS < rank;
  }

  __device__ __forceinline__ int row_of(int one) const {
    return one % SHRUNK_MATRICES * a.added.most + one / SHRUNK_MATRICES * PASS;
  }

  // Ask for the next stage; behind the last one there is nothing to ask for.
  __device__ __forceinline__ void ask() {
    if (is_there(set) && count > 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        long long row = row_of(set) + 8 * i;
        Eight eight = {(const char*)(a.added.a + row * INPUTS), 8};
        copy_eight<INPUTS>(ring + slot * RANKS_BYTES + i * EIGHT_BYTES, eight, first + block, lane);
      }
      if (++slot == SHRINK_STAGES) slot = 0;
      if (++block == count) block = 0, set += a.added.blocks;
    }
    end_copies();
  }
};

// Multiply by the ranks of this block; and let nothing be told to the next product.
__device__ __forceinline__ void shrink(const Arguments& a, Shared& shared, int rank, int first,
                                       int count) {
  constexpr int OWN = NORMED || HELD < 4 ? HELD : 4;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const char* ring = shared.ring[warp];
  Ranks ranks = {a, shared_address(ring), rank, first, count, lane, (int)blockIdx.x};
#pragma unroll
  for (int i = 0; i < SHRINK_STAGES; ++i) ranks.ask();
  wait_for_predecessors(IS_EARLY);
  Activations x[OWN];
#if NORMED
  wait_copies<SHRINK_STAGES>();
  __syncwarp();
  read_normed(a, shared, x, first, count);
#else
#pragma unroll
  for (int j = 0; j < OWN; ++j) read_activations(a, x[j], 0, first + j, lane, j < count);
#endif
  float4* parts = shared.parts[0][0];
  int slot = 0;
  for (int set = blockIdx.x; ranks.is_there(set); set += a.added.blocks) {
    float sums[4] = {};
    for (int base = 0; base < MOST; base += OWN) {
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        if (base + j >= count) continue;
        wait_copies<SHRINK_STAGES - 1>();
        __syncwarp();
        const char* stage = ring + slot * RANKS_BYTES;
        uint4 low[2], high[2];
        read_eight(stage, lane, low);
        read_eight(stage + EIGHT_BYTES, lane, high);
        if (++slot == SHRINK_STAGES) slot = 0;
        __syncwarp();
        ranks.ask();
        multiply_block(sums, low, high, x[j][0]);
        if (OWN < MOST) {
          int next = base + j + OWN;
          if (next >= count) next = j;  // the first blocks, for the next set
          read_activations(a, x[j], 0, first + next, lane, next < count);
        }
      }
    }
    parts[warp * BETWEEN_PARTS + lane] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    __syncthreads();
    if (warp == 0) {
      float4 sum = add_segments(parts, lane);
      int row = ranks.row_of(set) + lane / 4, token = lane % 4 * 2;
      float* to = a.added.shrunk + (long long)token * a.added.width + row;
      if (token < a.tokens) tell(to, sum.x), tell(to + 8, sum.z);
      to += a.added.width;
      if (token + 1 < a.tokens) tell(to, sum.y), tell(to + 8, sum.w);
    }
    __syncthreads();
  }
  if (blockIdx.x) return;
  for (int i = threadIdx.x; i < a.added.numbers / 4; i += THREADS)
    ((uint4*)a.added.cleared)[i] = make_uint4(UNTOLD, UNTOLD, UNTOLD, UNTOLD);
}

// What a lane of the last warps adds to an item.
struct Adding {
  const Arguments& a;
  int rank, item;  // none below 0
  Columns columns = {};
  uint4 bits[2];  // of x A, the first sixteen ranks
  bool is_asked, is_done;

  __device__ __forceinline__ AddedPlace place_in(int group, const float** x) const {
    int row, token, g = threadIdx.x % 32 / 4;
    place_of(group, item, &row, &token);
    *x = a.added.shrunk + (long long)min(g, a.tokens - 1) * a.added.width;
    return added_place(a, row);
  }

  // Its columns of B, which no kernel of the step writes.
  __device__ __forceinline__ void look_up(int group) {
    if (item >= 0) columns = columns_of_item(a, group, item);
  }

  __device__ __forceinline__ void begin() { is_asked = false, is_done = item < 0; }

  __device__ __forceinline__ void ask(int group) {
    bits[0] = bits[1] = make_uint4(0, 0, 0, 0);
    is_asked = true;
    if (is_done || rank == 0) return;
    const float* x;
    AddedPlace place = place_in(group, &x);
    x += threadIdx.x % 4 * 4;
    bits[0] = ask_told(x + place.first.x);
    if (place.apart()) bits[1] = ask_told(x + place.first.y);
  }

  __device__ __forceinline__ void add(int group, float4* part) {
    if (is_done) return;
    if (!is_asked) ask(group);
    const float* x;
    AddedPlace place = place_in(group, &x);
    int r = threadIdx.x % 4 * 4;
    float4 numbers[2] = {read_told(x + place.first.x + r, bits[0])};
    if (place.apart()) numbers[1] = read_told(x + place.first.y + r, bits[1]);
    Expansion expansion;
    expansion.add_sixteen(numbers, columns.fours, place.apart(), r, rank);
    const u16* b[2] = {a.added.b + (long long)place.column.x * a.added.most,
                       a.added.b + (long long)place.column.y * a.added.most};
    expansion.add<true>(x, b, place.first, place.apart(), PASS, rank);
    part[item] = expansion.sum(place.apart());
    is_done = true;
  }

  // Behind all but the last stage but one ask; before the last one add, if all is told.
  __device__ __forceinline__ void look(int group, int block, float4* part) {
    if (MOST < 3) return;
    if (block == MOST - 2) ask(group);
    if (block == MOST - 1 && __all_sync(~0u, is_told(bits[0]) && is_told(bits[1]))) add(group, part);
  }
};
#endif
