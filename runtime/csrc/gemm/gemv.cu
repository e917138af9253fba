#include "common/numbers.cuh"
#include "common/ring.cuh"
#include "gemm/weights.cuh"
#include "gemm/norm.cuh"
#include "gemm/outputs.cuh"
#include "gemm/feed.cuh"

// Up to COLUMNS tokens by EIGHTS times eight rows of weights a group. Warp w of a block has segment
// w of the inputs, with a ring of DEPTH stages of its own: there is no barrier before the segments
// are added. Blocks take group after group, and their rings go on from one to the next. Of SHARES
// of the tokens, COLUMNS each, a block has that of its place in y.
// NORMED: the inputs are float32 and normed here; else they are elements.

#define THREADS 256
#define TILES ((EIGHTS + 1) / 2)
#define WIDTHS (COLUMNS / 8)
#define STAGE_BYTES (EIGHTS * WEIGHT_BYTES)
#define RING_BYTES (DEPTH * STAGE_BYTES)
#define FRAGMENTS (TILES * WIDTHS)
// Blocks of inputs whose activations are held in registers at a time.
#define HELD (MOST * WIDTHS <= (SHRINK_STAGES ? 6 : 8) ? MOST : WIDTHS >= 4 ? 1 : 4 / WIDTHS)
#define ALL_HELD (HELD == MOST)
#define ITEMS (FRAGMENTS * 32)
// Nothing is left to ask for behind the first stages.
#define ALL_ASKED (!REPEATED && DEPTH >= MOST)
// Whether the next kernel may ask for its weights before this one has its inputs, where it is told
// so: it was measured (docs/performance.md). One that may be the first of a step never is early.
#define EARLY                                                     \
  (ALL_ASKED && (!ADDED || SHRINK_STAGES) && WEIGHT_BITS == 16 && \
   (OUTPUT == RESIDUAL || (OUTPUT == NUMBERS && NORMED)))
#define IS_EARLY (EARLY && a.early)
// Whether all that comes behind the wait runs once before it, without tokens and rows, where it is
// told so: code that a multiprocessor has not run for some microseconds has to be fetched.
#if __CUDA_ARCH__ >= 900
#define REHEARSED (ALL_ASKED && !ADDED && !TOKEN_STAGES && COLUMNS == 8 && WEIGHT_BITS == 16)
#else
#define REHEARSED 0
#endif
// Sums of several tokens lie where the weights of a block's only group were.
#define PARTS_IN_RING (!REPEATED && COLUMNS > 8)
#define PART_BYTES (ITEMS * 16)
// With TOKEN_STAGES activations have a ring too, behind that of the weights, or all of them stay.
#define TOKENS_STAY (TOKEN_STAGES == MOST)
#define TOKEN_BYTES (WIDTHS * EIGHT_BYTES)
#define RINGS_BYTES (RING_BYTES + TOKEN_STAGES * TOKEN_BYTES)
// Those that multiply by an adapter's A have a ring for its ranks there.
#define RANKS_RING_BYTES (SHRINK_STAGES * 2 * EIGHT_BYTES)
#define MOST_BYTES (RANKS_RING_BYTES > RINGS_BYTES ? RANKS_RING_BYTES : RINGS_BYTES)
#define WARP_BYTES (PARTS_IN_RING && PART_BYTES > MOST_BYTES ? PART_BYTES : MOST_BYTES)
// Groups begin behind the blocks that multiply by A.
#if SHRINK_STAGES
#define ADDED_PARTS 1
#define FIRST_GROUP ((int)blockIdx.x - a.added.blocks)
#define PRESENT ((int)gridDim.x - a.added.blocks)
#else
#define ADDED_PARTS 0
#define FIRST_GROUP ((int)blockIdx.x)
#define PRESENT ((int)gridDim.x)
#endif
// Blocks of inputs at a time, while their addresses leave registers for the sums.
#define ITERATIONS (MOST > 8 || (MOST > 2 && FRAGMENTS > 16) ? 1 : MOST)
#define BETWEEN_PARTS (PARTS_IN_RING ? WARP_BYTES / 16 : ITEMS)
#define FIRST_TOKEN (SHARES > 1 ? (int)blockIdx.y * COLUMNS : 0)

struct Shared {
  char ring[SEGMENTS][WARP_BYTES];
#if !PARTS_IN_RING
  float4 parts[REPEATED ? 2 : 1][SEGMENTS + ADDED_PARTS][ITEMS];
#endif
#if NORMED
  uint4 gains[BLOCKS * 8];
  float squares[SEGMENTS][COLUMNS];
#endif
};

static_assert(sizeof(Shared) == SHARED_BYTES, "what the launch asks for");

struct Ring {
  const Arguments& a;
  u32 start;
  int first, count, lane;
  int group, block, slot;
#if WEIGHT_BITS < 16
  Feed feed;
#endif

  // Ask for the next stage; behind the last one there is nothing to ask for.
  __device__ __forceinline__ void ask() {
    if (group < a.groups && count > 0) {
      u32 stage = start + slot * STAGE_BYTES;
#if WEIGHT_BITS < 16
      if (block == 0) feed.look_up(a, group, lane);
      feed.copy(stage, first + block, lane);
#else
#pragma unroll
      for (int i = 0; i < EIGHTS; ++i)
        copy_weights<true>(stage + i * WEIGHT_BYTES, eight_of(a, group * EIGHTS + i), first + block,
                           lane);
#endif
      if (++slot == DEPTH) slot = 0;
      if (++block == count) block = 0, group += PRESENT;
    }
    end_copies();
  }
};

// Of an odd number of eights the last tile has zeros in place of its last eight rows.
__device__ __forceinline__ void read_tile(const char* stage, int tile, int block, int lane,
                                          uint4 (&low)[2], uint4 (&high)[2]) {
  read_weights(stage + 2 * tile * WEIGHT_BYTES, block, lane, low);
  if (2 * tile + 1 < EIGHTS)
    read_weights(stage + (2 * tile + 1) * WEIGHT_BYTES, block, lane, high);
  else
    high[0] = high[1] = make_uint4(0, 0, 0, 0);
}

typedef uint4 Activations[WIDTHS][2];

__device__ __forceinline__ void read_activations(const Arguments& a, Activations& x, int width,
                                                 int block, int lane, bool there) {
  int token = FIRST_TOKEN + width * 8 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int input = first_input(block, i, lane % 4);
    x[width][i] = make_uint4(0, 0, 0, 0);
    if (there && token < a.tokens && (INPUTS % 64 == 0 || input < INPUTS))
      x[width][i] = *(const uint4*)((const u16*)a.inputs + (long long)token * INPUTS + input);
  }
}

#if TOKEN_STAGES
__device__ __forceinline__ void ask_tokens(const Arguments& a, u32 stage, int block, int lane) {
#pragma unroll
  for (int n = 0; n < WIDTHS; ++n) {
    int token = FIRST_TOKEN + n * 8;
    Eight eight = {(const char*)a.inputs, max(0, min(8, a.tokens - token))};
    if (eight.rows) eight.first += (long long)token * INPUTS * 2;
    copy_eight<INPUTS>(stage + n * EIGHT_BYTES, eight, block, lane);
  }
}
#endif

#if NORMED
// The norm of the tokens, each warp with its segment.
__device__ __forceinline__ void read_normed(const Arguments& a, Shared& shared,
                                            Activations (&x)[HELD], int first, int count,
                                            int tokens) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  Held held[WIDTHS];
  float sums[WIDTHS];
#pragma unroll
  for (int n = 0; n < WIDTHS; ++n) {
    int token = FIRST_TOKEN + n * 8 + g;
    const float* row = (const float*)a.inputs;
    bool there = token < tokens;
    if (there) row += row_of(a, token) * INPUTS;
    sums[n] = read_segment(held[n], row, there, first, count, q);
  }
#pragma unroll
  for (int n = 0; n < WIDTHS; ++n) {
    float sum = add_lanes(sums[n]);
    if (q == 0) shared.squares[warp][n * 8 + g] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < WIDTHS; ++n) {
    float squares = shared.squares[0][n * 8 + g];
#pragma unroll
    for (int w = 1; w < SEGMENTS; ++w) squares = __fadd_rn(squares, shared.squares[w][n * 8 + g]);
    float scale = norm_scale(squares, a.eps);
#pragma unroll
    for (int j = 0; j < MOST; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint4 gains = make_uint4(0, 0, 0, 0);
        if (j < count) gains = shared.gains[first_input(first + j, i, q) / 8];
        x[j][n][i] = normed_eight(held[n][j][i], scale, gains);
      }
  }
}
#endif

#include "gemm/items.cuh"
#include "lora/shrink.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    product(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *(Shared*)memory;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int first = first_block(warp), count = first_block(warp + 1) - first;
#if NORMED
  for (int i = lane; i < count * 8; i += 32) {
    bool there = INPUTS % 64 == 0 || (first * 8 + i) * 8 < INPUTS;
    copy_ahead(shared_address(&shared.gains[first * 8 + i]),
               a.gain + (there ? (first * 8 + i) * 8 : 0), there);
  }
  end_copies();
#endif
  int rank = rank_of(a);
#if SHRINK_STAGES
  if (FIRST_GROUP < 0) {
    shrink(a, shared, rank, first, count);
    return;
  }
#endif
  Ring ring = {a, shared_address(shared.ring[warp]), first, count, lane, FIRST_GROUP, 0, 0};
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) ring.ask();
  constexpr bool early = ADDED && !SHRINK_STAGES && ITEMS <= THREADS && !REPEATED;
  Columns columns = {};
  if (early && threadIdx.x < ITEMS) columns = columns_of_item(a, FIRST_GROUP, threadIdx.x);
#if SHRINK_STAGES
  Adding adding = {a, rank, (int)threadIdx.x - (THREADS - ITEMS)};
  if (!REPEATED) adding.look_up(FIRST_GROUP);
  if (IS_EARLY) let_next_begin();
  adding.warm(shared.parts[0][SEGMENTS]);
#endif
#if REHEARSED
  const bool hurried = IS_EARLY;
  if (hurried) let_next_begin();
#pragma unroll 1
  for (int pass = a.early == 2 ? 0 : 1; pass < 2; ++pass) {
  const bool live = pass;
  if (live) {
    wait_for_end();
    if (!hurried) let_next_begin();
  }
#else
  constexpr bool live = true;
  wait_for_predecessors(IS_EARLY);
#endif

#if !TOKEN_STAGES
  Activations x[HELD];
#endif
#if NORMED
  if (live) wait_copies<DEPTH>();
  __syncwarp();
  read_normed(a, shared, x, first, count, live ? a.tokens : 0);
#elif TOKEN_STAGES
  const char* tokens = shared.ring[warp] + RING_BYTES;
#pragma unroll
  for (int i = 0; i < TOKEN_STAGES; ++i) {
    if (i < count) ask_tokens(a, shared_address(tokens) + i * TOKEN_BYTES, first + i, lane);
    end_copies();
  }
#else
#pragma unroll
  for (int j = 0; j < HELD; ++j)
#pragma unroll
    for (int n = 0; n < WIDTHS; ++n)
      read_activations(a, x[j], n, first + j, lane, live && j < count);
#endif
  float4 before = {}, added = {};
  if (early && threadIdx.x < ITEMS)
    added = added_of(a, rank, FIRST_GROUP, threadIdx.x, columns);
  if (OUTPUT == RESIDUAL && ITEMS <= THREADS && !REPEATED && threadIdx.x < ITEMS)
    before = residuals_of(a, live ? FIRST_GROUP : a.groups, threadIdx.x);

  int slot = 0, parity = 0, token_slot = 0;
#if REHEARSED
  {
    // Nothing is read or stored of rows that are not there.
    const int group = live ? FIRST_GROUP : a.groups;
#else
  for (int group = FIRST_GROUP; group < a.groups; group += PRESENT) {
#endif
    float sums[TILES][WIDTHS][4] = {};
#if SHRINK_STAGES
    float4* ninth = shared.parts[parity][SEGMENTS];
    if (REPEATED) adding.look_up(group);
#endif
#if TOKEN_STAGES
#pragma unroll(ITERATIONS)
    for (int j = 0; j < MOST; ++j) {
      if (j >= count) continue;
      wait_copies<(DEPTH < TOKEN_STAGES ? DEPTH : TOKEN_STAGES) - 1>();
      __syncwarp();
      const char* stage = shared.ring[warp] + slot * STAGE_BYTES;
      const char* token_stage = tokens + (TOKENS_STAY ? j : token_slot) * TOKEN_BYTES;
      uint4 low[TILES][2], high[TILES][2];
#pragma unroll
      for (int t = 0; t < TILES; ++t) read_tile(stage, t, first + j, lane, low[t], high[t]);
      if (++slot == DEPTH) slot = 0;
#pragma unroll
      for (int n = 0; n < WIDTHS; ++n) {
        uint4 x[2];
        read_eight(token_stage + n * EIGHT_BYTES, lane, x);
#pragma unroll
        for (int t = 0; t < TILES; ++t) multiply_weights(sums[t][n], low[t], high[t], x);
      }
      if (ALL_ASKED && TOKENS_STAY) {
        end_copies();
        continue;
      }
      __syncwarp();
      if (!TOKENS_STAY) {
        int next = j + TOKEN_STAGES;
        bool again = REPEATED && next >= count && group + PRESENT < a.groups;
        if (again) next -= count;
        if (next < count) ask_tokens(a, shared_address(token_stage), first + next, lane);
        if (++token_slot == TOKEN_STAGES) token_slot = 0;
      }
      ring.ask();
    }
#else
    for (int base = 0; base < MOST; base += HELD) {
#pragma unroll
      for (int j = 0; j < HELD; ++j) {
        if (base + j >= count) continue;
#if SHRINK_STAGES
        adding.look(base + j, ninth);
#endif
        if (live) wait_copies<DEPTH - 1>();
        __syncwarp();
        const char* stage = shared.ring[warp] + slot * STAGE_BYTES;
        uint4 low[TILES][2], high[TILES][2];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
          read_tile(stage, t, first + base + j, lane, low[t], high[t]);
        if (++slot == DEPTH) slot = 0;
        __syncwarp();
        if (!ALL_ASKED)
          ring.ask();
        else if (live)
          end_copies();
#pragma unroll
        for (int n = 0; n < WIDTHS; ++n) {
#pragma unroll
          for (int t = 0; t < TILES; ++t) multiply_weights(sums[t][n], low[t], high[t], x[j][n]);
          if (!ALL_HELD) {
            int next = base + j + HELD;
            bool again = REPEATED && next >= count;  // the first blocks, for the next group
            if (again) next = j;
            read_activations(a, x[j], n, first + next, lane, next < count);
          }
        }
      }
    }
#endif
#if PARTS_IN_RING
    float4* parts = (float4*)shared.ring[0];
    __syncwarp();
#else
    float4* parts = shared.parts[parity][0];
#endif
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int n = 0; n < WIDTHS; ++n)
        parts[warp * BETWEEN_PARTS + (t * WIDTHS + n) * 32 + lane] =
            make_float4(sums[t][n][0], sums[t][n][1], sums[t][n][2], sums[t][n][3]);
#if SHRINK_STAGES
    adding.add(ninth);
#endif
    __syncthreads();
#pragma unroll
    for (int i = 0; i < (ITEMS + THREADS - 1) / THREADS; ++i) {
      int item = i * THREADS + threadIdx.x;
      if (ITEMS % THREADS && item >= ITEMS) break;
      if (OUTPUT == RESIDUAL && (ITEMS > THREADS || REPEATED)) before = residuals_of(a, group, item);
      if (ADDED && !SHRINK_STAGES && !early)
        added = added_of(a, rank, group, item, columns_of_item(a, group, item));
      finish(a, group, item, add_segments<SEGMENTS + ADDED_PARTS>(parts, item), before, added);
    }
    if (REPEATED) parity ^= 1;
  }
#if REHEARSED
  }
#endif
}
