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

constexpr int THREADS = 256;
constexpr int TILES = (Config::EIGHTS + 1) / 2;
constexpr int WIDTHS = Config::COLUMNS / 8;
constexpr int STAGE_BYTES = Config::EIGHTS * WEIGHT_BYTES;
constexpr int RING_BYTES = Config::DEPTH * STAGE_BYTES;
constexpr int FRAGMENTS = TILES * WIDTHS;
// Blocks of inputs whose activations are held in registers at a time.
constexpr int HELD = MOST * WIDTHS <= (Config::SHRINK_STAGES ? 6 : 8) ? MOST
                     : WIDTHS >= 4                                   ? 1
                                                                     : 4 / WIDTHS;
constexpr bool ALL_HELD = HELD == MOST;
constexpr int ITEMS = FRAGMENTS * 32;
// Nothing is left to ask for behind the first stages.
constexpr bool ALL_ASKED = !Config::REPEATED && Config::DEPTH >= MOST;
// True if the next kernel may prefetch its weights before this one has its inputs, if `early` says
// so: it was measured (docs/performance.md). One that may be the first of a step never is early.
constexpr bool EARLY =
    ALL_ASKED && (!Config::ADDED || Config::SHRINK_STAGES) && Config::WEIGHT_BITS == 16 &&
    (Config::OUTPUT == RESIDUAL || (Config::OUTPUT == NUMBERS && Config::NORMED));
// True if all that comes behind the wait runs once before it, without tokens and rows, if `early`
// says so: code that a multiprocessor has not run for some microseconds has to be fetched.
constexpr bool REHEARSED = HAS_DEPENDENTS && ALL_ASKED && !Config::ADDED && !Config::TOKEN_STAGES &&
                           Config::COLUMNS == 8 && Config::WEIGHT_BITS == 16;
// Sums of several tokens lie where the weights of a block's only group were.
constexpr bool PARTS_IN_RING = !Config::REPEATED && Config::COLUMNS > 8;
constexpr int PART_BYTES = ITEMS * 16;
// With TOKEN_STAGES activations have a ring too, behind that of the weights, or all of them stay.
constexpr bool TOKENS_STAY = Config::TOKEN_STAGES == MOST;
constexpr int TOKEN_BYTES = WIDTHS * EIGHT_BYTES;
constexpr int FEWER_STAGES =
    Config::DEPTH < Config::TOKEN_STAGES ? Config::DEPTH : Config::TOKEN_STAGES;
constexpr int RINGS_BYTES = RING_BYTES + Config::TOKEN_STAGES * TOKEN_BYTES;
// Blocks that multiply by an adapter's A have a ring for its ranks there.
constexpr int RANKS_RING_BYTES = Config::SHRINK_STAGES * 2 * EIGHT_BYTES;
constexpr int MOST_BYTES = RANKS_RING_BYTES > RINGS_BYTES ? RANKS_RING_BYTES : RINGS_BYTES;
constexpr int WARP_BYTES = PARTS_IN_RING && PART_BYTES > MOST_BYTES ? PART_BYTES : MOST_BYTES;
constexpr int ADDED_PARTS = Config::SHRINK_STAGES ? 1 : 0;
// Blocks of inputs at a time, while their addresses leave registers for the sums.
constexpr int ITERATIONS = MOST > 8 || (MOST > 2 && FRAGMENTS > 16) ? 1 : MOST;
constexpr int BETWEEN_PARTS = PARTS_IN_RING ? WARP_BYTES / 16 : ITEMS;

// Groups begin behind the blocks that multiply by A.
__device__ __forceinline__ int first_group(const Arguments& a) {
  return (int)blockIdx.x - (Config::SHRINK_STAGES ? a.added.blocks : 0);
}
__device__ __forceinline__ int present(const Arguments& a) {
  return (int)gridDim.x - (Config::SHRINK_STAGES ? a.added.blocks : 0);
}
__device__ __forceinline__ int first_token() {
  return Config::SHARES > 1 ? (int)blockIdx.y * Config::COLUMNS : 0;
}
__device__ __forceinline__ bool is_early(const Arguments& a) { return EARLY && a.early; }

// Shared memory of a block: its rings, sums that lie beside them, and what norms take.
template <bool PARTS, bool NORMS>
struct Layout {
  char ring[SEGMENTS][WARP_BYTES];
  float4 parts[Config::REPEATED ? 2 : 1][SEGMENTS + ADDED_PARTS][ITEMS];
  uint4 gains[BLOCKS * 8];
  float squares[SEGMENTS][Config::COLUMNS];
};

template <>
struct Layout<true, false> {
  char ring[SEGMENTS][WARP_BYTES];
  float4 parts[Config::REPEATED ? 2 : 1][SEGMENTS + ADDED_PARTS][ITEMS];
  static constexpr uint4* gains = nullptr;
  static constexpr float (*squares)[Config::COLUMNS] = nullptr;
};

template <>
struct Layout<false, true> {
  char ring[SEGMENTS][WARP_BYTES];
  static constexpr float4 (*parts)[SEGMENTS + ADDED_PARTS][ITEMS] = nullptr;
  uint4 gains[BLOCKS * 8];
  float squares[SEGMENTS][Config::COLUMNS];
};

template <>
struct Layout<false, false> {
  char ring[SEGMENTS][WARP_BYTES];
  static constexpr float4 (*parts)[SEGMENTS + ADDED_PARTS][ITEMS] = nullptr;
  static constexpr uint4* gains = nullptr;
  static constexpr float (*squares)[Config::COLUMNS] = nullptr;
};

typedef Layout<!PARTS_IN_RING, Config::NORMED> Shared;

static_assert(sizeof(Shared) == Config::SHARED_BYTES, "what the launch asks for");

struct Ring {
  const Arguments& a;
  u32 start;
  int first, count, lane;
  int group, block, slot;
  Feed feed;  // IN_INTEGERS

  // Ask for the next stage; behind the last one there is nothing to ask for.
  __device__ __forceinline__ void ask() {
    if (group < a.groups && count > 0) {
      u32 stage = start + slot * STAGE_BYTES;
      if constexpr (IN_INTEGERS) {
        if (block == 0) feed.look_up(a, group, lane);
        feed.copy(stage, first + block, lane);
      } else {
#pragma unroll
        for (int i = 0; i < Config::EIGHTS; ++i)
          copy_weights<true>(stage + i * WEIGHT_BYTES, eight_of(a, group * Config::EIGHTS + i),
                             first + block, lane);
      }
      if (++slot == Config::DEPTH) slot = 0;
      if (++block == count) block = 0, group += present(a);
    }
    end_copies();
  }
};

// Of an odd number of eights the last tile has zeros in place of its last eight rows.
__device__ __forceinline__ void read_tile(const char* stage, int tile, int block, int lane,
                                          uint4 (&low)[2], uint4 (&high)[2]) {
  read_weights(stage + 2 * tile * WEIGHT_BYTES, block, lane, low);
  if (2 * tile + 1 < Config::EIGHTS)
    read_weights(stage + (2 * tile + 1) * WEIGHT_BYTES, block, lane, high);
  else
    high[0] = high[1] = make_uint4(0, 0, 0, 0);
}

typedef uint4 Activations[WIDTHS][2];

__device__ __forceinline__ void read_activations(const Arguments& a, Activations& x, int width,
                                                 int block, int lane, bool there) {
  int token = first_token() + width * 8 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int input = first_input(block, i, lane % 4);
    x[width][i] = make_uint4(0, 0, 0, 0);
    if (there && token < a.tokens && (Config::INPUTS % 64 == 0 || input < Config::INPUTS))
      x[width][i] =
          *(const uint4*)((const u16*)a.inputs + (long long)token * Config::INPUTS + input);
  }
}

__device__ __forceinline__ void ask_tokens(const Arguments& a, u32 stage, int block, int lane) {
#pragma unroll
  for (int n = 0; n < WIDTHS; ++n) {
    int token = first_token() + n * 8;
    Eight eight = {(const char*)a.inputs, max(0, min(8, a.tokens - token))};
    if (eight.rows) eight.first += (long long)token * Config::INPUTS * 2;
    copy_eight<Config::INPUTS>(stage + n * EIGHT_BYTES, eight, block, lane);
  }
}

// The norm of the tokens, each warp with its segment.
template <int COUNT>
__device__ __forceinline__ void read_normed(const Arguments& a, Shared& shared,
                                            Activations (&x)[COUNT], int first, int count,
                                            int tokens) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  Held held[WIDTHS];
  float sums[WIDTHS];
#pragma unroll
  for (int n = 0; n < WIDTHS; ++n) {
    int token = first_token() + n * 8 + g;
    const float* row = (const float*)a.inputs;
    bool there = token < tokens;
    if (there) row += row_of(a, token) * Config::INPUTS;
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

// The sums of one item, of the segments in ascending order.
template <int COUNT = SEGMENTS>
__device__ __forceinline__ float4 add_segments(const float4* parts, int item) {
  float4 sum = parts[item];
#pragma unroll
  for (int w = 1; w < COUNT; ++w) {
    float4 part = parts[w * BETWEEN_PARTS + item];
    sum.x = __fadd_rn(sum.x, part.x);
    sum.y = __fadd_rn(sum.y, part.y);
    sum.z = __fadd_rn(sum.z, part.z);
    sum.w = __fadd_rn(sum.w, part.w);
  }
  return sum;
}

// An item is what a lane has of a fragment: rows g and g + 8 of a tile, tokens 2q and 2q + 1. Of an
// odd number of eights the last tile has its first eight rows alone.
__device__ __forceinline__ void place_of(int group, int item, int* row, int* token) {
  int lane = item % 32, fragment = item / 32;
  int eight = group * Config::EIGHTS + fragment / WIDTHS * 2;
  *row = (IS_GATED ? eight / 2 : eight) * 8 + lane / 4;
  *token = first_token() + fragment % WIDTHS * 8 + lane % 4 * 2;
}

__device__ __forceinline__ bool is_whole(int item) {
  return Config::EIGHTS % 2 == 0 || item / 32 / WIDTHS + 1 < TILES;
}

__device__ __forceinline__ float4 residuals_of(const Arguments& a, int group, int item) {
  int row, token;
  place_of(group, item, &row, &token);
  float4 x = make_float4(residual_of(a, row, token), residual_of(a, row, token + 1), 0, 0);
  if (is_whole(item)) {
    x.z = residual_of(a, row + 8, token);
    x.w = residual_of(a, row + 8, token + 1);
  }
  return x;
}

__device__ __forceinline__ Columns columns_of_item(const Arguments& a, int group, int item) {
  int row, token;
  place_of(group, item, &row, &token);
  return columns_of(a, row);
}

__device__ __forceinline__ float4 added_of(const Arguments& a, int rank, int group, int item,
                                           const Columns& columns) {
  int row, token;
  place_of(group, item, &row, &token);
  return added_to(a, rank, row, token, columns);
}

__device__ __forceinline__ void finish(const Arguments& a, int group, int item, float4 sum,
                                       float4 before, float4 added) {
  int row, token;
  place_of(group, item, &row, &token);
  if constexpr (IS_GATED) {
    finish_gated(a, row, token, sum.x, sum.z, added.x, added.z);
    finish_gated(a, row, token + 1, sum.y, sum.w, added.y, added.w);
    return;
  }
  finish_one(a, row, token, sum.x, before.x, added.x);
  finish_one(a, row, token + 1, sum.y, before.y, added.y);
  if (is_whole(item)) {
    finish_one(a, row + 8, token, sum.z, before.z, added.z);
    finish_one(a, row + 8, token + 1, sum.w, before.w, added.w);
  }
}
#include "lora/shrink.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, Config::RESIDENT)
    product(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *(Shared*)memory;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int first = first_block(warp), count = first_block(warp + 1) - first;
  if constexpr (Config::NORMED) {
    for (int i = lane; i < count * 8; i += 32) {
      bool there = Config::INPUTS % 64 == 0 || (first * 8 + i) * 8 < Config::INPUTS;
      copy_ahead(shared_address(&shared.gains[first * 8 + i]),
                 a.gain + (there ? (first * 8 + i) * 8 : 0), there);
    }
    end_copies();
  }
  int rank = rank_of(a);
  if constexpr (Config::SHRINK_STAGES > 0) {
    if (first_group(a) < 0) {
      shrink(a, shared, rank, first, count);
      return;
    }
  }
  Ring ring = {a, shared_address(shared.ring[warp]), first, count, lane, first_group(a), 0, 0};
#pragma unroll
  for (int i = 0; i < Config::DEPTH; ++i) ring.ask();
  constexpr bool early = ADDED_BEHIND && ITEMS <= THREADS && !Config::REPEATED;
  Columns columns = {};
  if (early && threadIdx.x < ITEMS) columns = columns_of_item(a, first_group(a), threadIdx.x);
  Adding adding = {a, rank, (int)threadIdx.x - (THREADS - ITEMS)};
  if constexpr (Config::SHRINK_STAGES > 0) {
    if (!Config::REPEATED) adding.look_up(first_group(a));
    if (is_early(a)) let_next_begin();
    adding.warm(shared.parts[0][SEGMENTS]);
  }
  const bool hurried = REHEARSED && is_early(a);
  if (hurried) let_next_begin();
  // Without the block's rows and tokens, where it is not `live`.
  const u32 thread = threadIdx.x;
  auto run = [&](const bool live) {
    if constexpr (REHEARSED) {
      if (live) {
        wait_for_end();
        if (!hurried) let_next_begin();
      }
    } else {
      wait_for_predecessors(is_early(a));
    }

    Activations x[HELD];
    const char* tokens = shared.ring[warp] + RING_BYTES;
    if constexpr (Config::NORMED) {
      if (live) wait_copies<Config::DEPTH>();
      __syncwarp();
      read_normed(a, shared, x, first, count, live ? a.tokens : 0);
    } else if constexpr (Config::TOKEN_STAGES > 0) {
#pragma unroll
      for (int i = 0; i < Config::TOKEN_STAGES; ++i) {
        if (i < count) ask_tokens(a, shared_address(tokens) + i * TOKEN_BYTES, first + i, lane);
        end_copies();
      }
    } else {
#pragma unroll
      for (int j = 0; j < HELD; ++j)
#pragma unroll
        for (int n = 0; n < WIDTHS; ++n)
          read_activations(a, x[j], n, first + j, lane, live && j < count);
    }
    float4 before = {}, added = {};
    if (early && thread < ITEMS)
      added = added_of(a, rank, first_group(a), thread, columns);
    if (Config::OUTPUT == RESIDUAL && ITEMS <= THREADS && !Config::REPEATED && thread < ITEMS)
      before = residuals_of(a, live ? first_group(a) : a.groups, thread);

    int slot = 0, parity = 0, token_slot = 0;
    // Nothing is read or stored of rows that are not there.
    for (int group = live ? first_group(a) : a.groups; REHEARSED || group < a.groups;
         group += present(a)) {
      float sums[TILES][WIDTHS][4] = {};
      float4* ninth = nullptr;
      if constexpr (Config::SHRINK_STAGES > 0) {
        ninth = shared.parts[parity][SEGMENTS];
        if (Config::REPEATED) adding.look_up(group);
      }
      if constexpr (Config::TOKEN_STAGES > 0) {
#pragma unroll(ITERATIONS)
        for (int j = 0; j < MOST; ++j) {
          if (j >= count) continue;
          wait_copies<FEWER_STAGES - 1>();
          __syncwarp();
          const char* stage = shared.ring[warp] + slot * STAGE_BYTES;
          const char* token_stage = tokens + (TOKENS_STAY ? j : token_slot) * TOKEN_BYTES;
          uint4 low[TILES][2], high[TILES][2];
#pragma unroll
          for (int t = 0; t < TILES; ++t) read_tile(stage, t, first + j, lane, low[t], high[t]);
          if (++slot == Config::DEPTH) slot = 0;
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
            int next = j + Config::TOKEN_STAGES;
            bool again = Config::REPEATED && next >= count && group + present(a) < a.groups;
            if (again) next -= count;
            if (next < count) ask_tokens(a, shared_address(token_stage), first + next, lane);
            if (++token_slot == Config::TOKEN_STAGES) token_slot = 0;
          }
          ring.ask();
        }
      } else {
        for (int base = 0; base < MOST; base += HELD) {
#pragma unroll
          for (int j = 0; j < HELD; ++j) {
            if (base + j >= count) continue;
            if constexpr (Config::SHRINK_STAGES > 0) adding.look(base + j, ninth);
            if (live) wait_copies<Config::DEPTH - 1>();
            __syncwarp();
            const char* stage = shared.ring[warp] + slot * STAGE_BYTES;
            uint4 low[TILES][2], high[TILES][2];
#pragma unroll
            for (int t = 0; t < TILES; ++t)
              read_tile(stage, t, first + base + j, lane, low[t], high[t]);
            if (++slot == Config::DEPTH) slot = 0;
            __syncwarp();
            if (!ALL_ASKED)
              ring.ask();
            else if (live)
              end_copies();
#pragma unroll
            for (int n = 0; n < WIDTHS; ++n) {
#pragma unroll
              for (int t = 0; t < TILES; ++t)
                multiply_weights(sums[t][n], low[t], high[t], x[j][n]);
              if (!ALL_HELD) {
                int next = base + j + HELD;
                // The first blocks, for the next group.
                bool again = Config::REPEATED && next >= count;
                if (again) next = j;
                read_activations(a, x[j], n, first + next, lane, next < count);
              }
            }
          }
        }
      }
      float4* parts;
      if constexpr (PARTS_IN_RING) {
        parts = (float4*)shared.ring[0];
        __syncwarp();
      } else {
        parts = shared.parts[parity][0];
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int n = 0; n < WIDTHS; ++n)
          parts[warp * BETWEEN_PARTS + (t * WIDTHS + n) * 32 + lane] =
              make_float4(sums[t][n][0], sums[t][n][1], sums[t][n][2], sums[t][n][3]);
      if constexpr (Config::SHRINK_STAGES > 0) adding.add(ninth);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < (ITEMS + THREADS - 1) / THREADS; ++i) {
        int item = i * THREADS + thread;
        if (ITEMS % THREADS && item >= ITEMS) break;
        if (Config::OUTPUT == RESIDUAL && (ITEMS > THREADS || Config::REPEATED))
          before = residuals_of(a, group, item);
        if (Config::ADDED && !Config::SHRINK_STAGES && !early)
          added = added_of(a, rank, group, item, columns_of_item(a, group, item));
        finish(a, group, item, add_segments<SEGMENTS + ADDED_PARTS>(parts, item), before, added);
      }
      if (Config::REPEATED) parity ^= 1;
      if constexpr (REHEARSED) break;
    }
  };
  if constexpr (REHEARSED) {
#pragma unroll 1
    for (int pass = a.early == 2 ? 0 : 1; pass < 2; ++pass) run(pass);
  } else {
    run(true);
  }
}
