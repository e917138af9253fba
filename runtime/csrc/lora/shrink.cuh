// x A B in a product of few tokens. The first blocks of its grid, on multiprocessors that have no
// rows of the product, multiply by sixteen ranks of a matrix of A each, in the order of every
// product, and publish x A to all others. Of these the last warps add x A B, a tile of rows each,
// as a ninth part of the sums: before their last stage if x A is complete by then, or behind it.
// All blocks of the grid are on the GPU at once. Include behind the items of gemv.cu.

constexpr int PASS = 16;
// Of few inputs the weights are there before x A is: then it counts that code has been fetched before
// the wait. Of many blocks look for x A before their last stage.
constexpr bool SHORT = MOST < 5;
constexpr bool WARM = SHORT && !Config::REPEATED;
constexpr int RANKS_BYTES = 2 * EIGHT_BYTES;
constexpr int SHRUNK_MATRICES = Config::OUTPUT == GATED ? 2 : Config::MATRICES;

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
        Eight eight = {(const char*)(a.added.a + row * Config::INPUTS), 8};
        copy_eight<Config::INPUTS>(ring + slot * RANKS_BYTES + i * EIGHT_BYTES, eight,
                                   first + block, lane);
      }
      if (++slot == Config::SHRINK_STAGES) slot = 0;
      if (++block == count) block = 0, set += a.added.blocks;
    }
    end_copies();
  }
};

// Multiply by the ranks of this block, and reset the next product's x A.
__device__ __forceinline__ void shrink(const Arguments& a, Shared& shared, int rank, int first,
                                       int count) {
  constexpr int OWN = Config::NORMED || HELD < 4 ? HELD : 4;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ranks ranks = {a, shared_address(shared.ring[warp]), rank, first, count, lane, (int)blockIdx.x};
#pragma unroll
  for (int i = 0; i < Config::SHRINK_STAGES; ++i) ranks.ask();
  if (SHORT && is_early(a)) let_next_begin();
  float4* parts = shared.parts[0][0];
  // Once for nothing, so that the code is there when the wait is over.
#pragma unroll 1
  for (int dry = SHORT; dry >= 0; --dry) {
    int tokens = dry ? 0 : a.tokens, slot = 0;
    if (!dry) wait_for_predecessors(is_early(a));
    Activations x[OWN];
    if constexpr (Config::NORMED) {
      wait_copies<Config::SHRINK_STAGES>();
      __syncwarp();
      read_normed(a, shared, x, first, count, tokens);
    } else {
#pragma unroll
      for (int j = 0; j < OWN; ++j)
        read_activations(a, x[j], 0, first + j, lane, !dry && j < count);
    }
    for (int set = blockIdx.x; ranks.is_there(set); set += a.added.blocks) {
      float sums[4] = {};
      for (int base = 0; base < MOST; base += OWN) {
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
          if (base + j >= count) continue;
          wait_copies<Config::SHRINK_STAGES - 1>();
          __syncwarp();
          const char* stage = shared.ring[warp] + slot * RANKS_BYTES;
          uint4 low[2], high[2];
          read_eight(stage, lane, low);
          read_eight(stage + EIGHT_BYTES, lane, high);
          if (++slot == Config::SHRINK_STAGES) slot = 0;
          __syncwarp();
          if (!dry) ranks.ask();
          multiply_block(sums, low, high, x[j][0]);
          if (OWN < MOST) {
            int next = base + j + OWN;
            if (next >= count) next = j;  // the first blocks, for the next set
            read_activations(a, x[j], 0, first + next, lane, !dry && next < count);
          }
        }
        if (dry) break;
      }
      parts[warp * BETWEEN_PARTS + lane] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      __syncthreads();
      if (warp == 0) {
        float4 sum = add_segments(parts, lane);
        int row = ranks.row_of(set) + lane / 4, token = lane % 4 * 2;
        float* to = a.added.shrunk + (long long)token * a.added.width + row;
        if (token < tokens) tell(to, sum.x), tell(to + 8, sum.z);
        to += a.added.width;
        if (token + 1 < tokens) tell(to, sum.y), tell(to + 8, sum.w);
      }
      __syncthreads();
      if (dry) break;
    }
  }
  if (blockIdx.x) return;
  for (int i = threadIdx.x; i < a.added.numbers / 4; i += THREADS)
    ((uint4*)a.added.cleared)[i] = make_uint4(UNTOLD, UNTOLD, UNTOLD, UNTOLD);
}

// Addend of a lane's sums: x is the row of its token in x A, `first` the places where the
// numbers begin that belong to its two rows' matrices, `column` the rows' columns of B; the first
// sixteen ranks of both are given, or asked for at least.
__device__ __forceinline__ float4 expand_inline(const float* x, int2 first, const u16* b,
                                                int2 column, uint4 one, uint4 other,
                                                Columns columns, int rank) {
  int r = threadIdx.x % 4 * 4;
  bool apart = Config::OUTPUT == GATED || (Config::MATRICES > 1 && first.x != first.y);
  float4 numbers[2] = {read_told(x + first.x + r, one)};
  if (apart) numbers[1] = read_told(x + first.y + r, other);
  Expansion expansion;
#pragma unroll 1
  for (int from = 0;; r += PASS) {
    expansion.add_sixteen(numbers, columns.fours, apart, r, rank);
    from += PASS;
    if (from >= rank) break;
    columns.fours[0] = *(const uint2*)(b + column.x + r + PASS);
    columns.fours[1] = *(const uint2*)(b + column.y + r + PASS);
    numbers[0] = read_told(x + first.x + r + PASS);
    if (apart) numbers[1] = read_told(x + first.y + r + PASS);
  }
  return expansion.sum(apart);
}

__device__ __noinline__ float4 expand_apart(const float* x, int2 first, const u16* b, int2 column,
                                            uint4 one, uint4 other, Columns columns, int rank) {
  return expand_inline(x, first, b, column, one, other, columns, rank);
}

// One copy of the code serves, where it has been fetched before it is needed.
__device__ __forceinline__ float4 expand(const float* x, int2 first, const u16* b, int2 column,
                                         uint4 one, uint4 other, Columns columns, int rank) {
  if constexpr (WARM)
    return expand_apart(x, first, b, column, one, other, columns, rank);
  else
    return expand_inline(x, first, b, column, one, other, columns, rank);
}

// Addend of a lane of the last warps to an item.
struct Adding {
  const Arguments& a;
  int rank, item;  // none below 0
  Columns columns = {};
  const float* x;  // of its token
  int2 starts, column;
  uint4 bits[2];  // of x A, the first sixteen ranks
  bool is_asked, is_done;

  // Its columns of B, which no kernel of the step writes.
  __device__ __forceinline__ void look_up(int group) {
    is_asked = false, is_done = item < 0;
    if (item < 0) return;
    int row, token, g = threadIdx.x % 32 / 4;
    place_of(group, item, &row, &token);
    x = a.added.shrunk + (long long)min(g, a.tokens - 1) * a.added.width;
    AddedPlace place = added_place(a, row);
    starts = place.first;
    column = make_int2(place.column.x * a.added.most, place.column.y * a.added.most);
    columns.fours[0] = *(const uint2*)(a.added.b + column.x + threadIdx.x % 4 * 4);
    columns.fours[1] = *(const uint2*)(a.added.b + column.y + threadIdx.x % 4 * 4);
  }

  // First numbers of its rows' matrices.
  __device__ __forceinline__ int2 first() const {
    if constexpr (IS_GATED) return make_int2(0, a.added.most);
    return Config::MATRICES > 1 ? starts : make_int2(0, 0);
  }

  // Have the code of `add` fetched, which would wait for it.
  __device__ __forceinline__ void warm(float4* part) {
    uint4 none = make_uint4(0, 0, 0, 0);
    if (WARM && item >= 0)
      part[item] = expand(x, first(), a.added.b, column, none, none, Columns{}, 0);
  }

  __device__ __forceinline__ void ask() {
    bits[0] = bits[1] = make_uint4(0, 0, 0, 0);
    is_asked = true;
    if (is_done || rank == 0) return;
    const float* from = x + threadIdx.x % 4 * 4;
    int2 at = first();
    bits[0] = ask_told(from + at.x);
    if (IS_GATED || (Config::MATRICES > 1 && at.x != at.y)) bits[1] = ask_told(from + at.y);
  }

  __device__ __forceinline__ void add(float4* part) {
    if (is_done) return;
    if (!is_asked) ask();
    part[item] = expand(x, first(), a.added.b, column, bits[0], bits[1], columns, rank);
    is_done = true;
  }

  // Behind all but the last stage but one ask; before the last one add, if x A is complete.
  __device__ __forceinline__ void look(int block, float4* part) {
    if (SHORT) return;
    if (block == MOST - 2) ask();
    if (block == MOST - 1 && __all_sync(~0u, is_told(bits[0]) && is_told(bits[1]))) add(part);
  }
};
