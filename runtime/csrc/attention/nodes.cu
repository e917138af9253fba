#include "common/numbers.cuh"
#include "common/ring.cuh"
#include "common/tiles.cuh"
#include "attention/rotate.cuh"
#include "attention/arguments.cuh"

// Attention of a row's tokens, at most 64, a tree's or one behind the other, which are rotated and
// cached before (docs/kernels.md; its numbers are those of attention.cu). A block has eight tokens
// of a KV head. All warps share the splits that end before the row's start; from there on a warp
// has a token. Whole spans before the row's start are other blocks', which come last in the grid;
// then the last one of a tile merges what all have left.
//
// An instruction runs a few times only, and is fetched when it does: loops that can stay loops.

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int SPLIT = 64;
constexpr int SPAN = 4;
// Query rows of a block, in tiles of 16 that SHARE warps have together.
constexpr int ROWS = WARPS * GROUP;
constexpr int HALVES = ROWS < 16 ? 1 : 2;
constexpr int TILES = ROWS < 16 ? 1 : ROWS / 16;
constexpr int SHARE = WARPS / TILES;
constexpr int SCORED = 8 / SHARE;
constexpr int SCORES = 72;
// A row in shared memory: eight of them meet no bank twice.
constexpr int STRIDE = DIM * 2 + 16;
constexpr int STEPS = DIM / 16;
constexpr int PIECES = DIM / 8;
// Pairs of eight columns of the values that a warp has of its tile.
constexpr int OWN = (STEPS + SHARE - 1) / SHARE;
// Slots from the first split on that the row's start is in: less than a split, and all nodes.
constexpr int WINDOW = 2 * SPLIT;
constexpr int WIDTH = DIM + 8;

#include "attention/softmax.cuh"

struct Shared {
  __align__(16) unsigned char keys[WINDOW * STRIDE];
  unsigned char values[WINDOW * STRIDE];
  union {
    unsigned char common[2][SPLIT * STRIDE];  // keys and values of a split
    float o[ROWS][WIDTH];                     // sums of the splits behind the last whole span
  };
  unsigned char queries[TILES * 16 * STRIDE];
  float scores[TILES][8 * HALVES][SCORES];
  float2 sums[ROWS];
  unsigned char path[WARPS][WINDOW];  // where in the window a warp's token has its positions
};

static_assert(sizeof(Shared) == Config::SHARED_BYTES, "what the launch asks for");

// Ask for so many slots of a cache.
__device__ void copy_slots(unsigned char* to, const u16* from, int count) {
  u32 base = shared_address(to);
#pragma unroll 1
  for (int i = threadIdx.x; i < count * PIECES; i += THREADS)
    copy_all(base + i / PIECES * STRIDE + i % PIECES * 16, from + (i64)i * 8);
}

#include "attention/nodes_common.cuh"
#include "attention/nodes_own.cuh"

// True if this block is the last of a tile's `all`; it sees what others left.
__device__ bool is_last(u32* ticket, int all) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 before;
    // It serves the block, as barriers come around it.
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(ticket)
                 : "memory");
    last = before == all - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  return last;
}

// Merge what was left of so many rows in ascending order of the units.
__device__ void merge(const Arguments& a, i64 first, int units, int rows, i64 token, int kv_head) {
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * (DIM / 4); i += THREADS) {
    int at = i / (DIM / 4), quad = i % (DIM / 4);
    float m = MINUS_INFINITY, l = 0.0f;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int unit = 0; unit < units; ++unit) {
      i64 from = (first + unit) * ROWS + at;
      float2 sums = __ldcg(a.sums + from);
      float4 next = __ldcg((const float4*)(a.partial + from * DIM) + quad);
      Merge merge(m, sums.x);
      m = merge.top;
      l = merge.of(l, sums.y);
      o = make_float4(merge.of(o.x, next.x), merge.of(o.y, next.y), merge.of(o.z, next.z),
                      merge.of(o.w, next.w));
    }
    float share = inverse(l);
    i64 head = (token + at / GROUP) * QUERY_HEADS + kv_head * GROUP + at % GROUP;
    ((uint2*)(a.out + head * DIM))[quad] =
        make_uint2(pack(__fmul_rn(o.x, share), __fmul_rn(o.y, share)),
                   pack(__fmul_rn(o.z, share), __fmul_rn(o.w, share)));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *(Shared*)memory;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x, kv_head = blockIdx.y;
  int row = blockIdx.z % a.batch, part = blockIdx.z / a.batch, helpers = gridDim.z / a.batch - 1;
  int own = tile * WARPS + warp, node = min(own, a.seq_len - 1);
  int start = first_slot(a, row), splits = start / SPLIT, spans = splits / SPAN;
  int base = splits * SPLIT, filled = start - base;
  if (part > spans) return;
  i64 tokens = (i64)row * a.seq_len, cache = ((i64)row * KV_HEADS + kv_head) * a.kv_len * DIM;
  const u16 *keys = a.keys + cache, *values = a.values + cache;
  Nodes nodes(a, tokens + node, node);
  // Inputs that the step does not write.
  if (part == 0) {
    copy_slots(shared.keys, keys + (i64)base * DIM, filled);
    copy_slots(shared.values, values + (i64)base * DIM, filled);
  }
  int begin = part ? (part - 1) * SPAN : spans * SPAN;
  ask_common(shared, keys, values, begin < splits ? begin : -1);
  if (part == 0) find_path(shared.path[warp], nodes, node, filled, a.kv_len - 1 - base);
  wait_for_predecessors();
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
    int at = i / PIECES, piece = i % PIECES;
    i64 token = tokens + min(tile * WARPS + at / GROUP, a.seq_len - 1);
    i64 head = token * QUERY_HEADS + kv_head * GROUP + at % GROUP;
    copy_all(shared_address(shared.queries) + at * STRIDE + piece * 16,
             a.queries + head * DIM + piece * 8);
  }
  if (part == 0) {
    int fresh = min(a.seq_len, a.kv_len - start);
    copy_slots(shared.keys + filled * STRIDE, keys + (i64)start * DIM, fresh);
    copy_slots(shared.values + filled * STRIDE, values + (i64)start * DIM, fresh);
  }
  end_copies();
  wait_copies<0>();
  __syncthreads();

  int tiles = gridDim.x;
  i64 place = ((i64)row * KV_HEADS + kv_head) * tiles + tile, first = place * a.units;
  // Spans that are whole are left for the last block, and what is behind them for this one.
#pragma unroll 1
  for (int next; begin < (part ? spans * SPAN : splits); begin = next) {
    Common common;
    attend_common(shared, keys, values, begin, min(begin + SPAN, splits), common);
    i64 unit = first + begin / SPAN;
    float* o = part ? a.partial + unit * ROWS * DIM : shared.o[0];
    leave(common, o, part ? a.sums + unit * ROWS : shared.sums, part ? DIM : WIDTH);
    next = part ? begin + helpers * SPAN : splits;
    ask_common(shared, keys, values, part && next < spans * SPAN ? next : -1);
  }
  if (part == 0) {
    Whole whole, span;
    whole.clear();
    span.clear();
    if (splits % SPAN) {
      __syncthreads();
      take(shared, span);
    }
    int seen = min(a.kv_len, start + nodes.count());
    for (int split = splits; split * SPLIT < seen; ++split) {
      if (split > splits && split % SPAN == 0) {
        whole.add(span);
        span.clear();
      }
      add_split(shared, shared.path[warp] + (split - splits) * SPLIT, seen - split * SPLIT, span);
    }
    if (spans) {
      leave(whole, a.partial + (first + spans) * ROWS * DIM, a.sums + (first + spans) * ROWS);
      leave(span, a.partial + (first + spans + 1) * ROWS * DIM,
            a.sums + (first + spans + 1) * ROWS);
    } else {
      whole.add(span);
      float share = inverse(whole.l[0]);
      int g = lane / 4;
      if (own < a.seq_len && g < GROUP) {
        i64 head = (tokens + own) * QUERY_HEADS + kv_head * GROUP + g;
        u32* out = (u32*)(a.out + head * DIM) + lane % 4;
#pragma unroll
        for (int n = 0; n < 2 * STEPS; ++n)
          out[n * 4] = pack(__fmul_rn(whole.o[n][0], share), __fmul_rn(whole.o[n][1], share));
      }
    }
  }
  if (spans && is_last(a.tickets + place, min(spans, helpers) + 1)) {
    int rows = min(ROWS, (a.seq_len - tile * WARPS) * GROUP);
    merge(a, first, spans + 2, rows, tokens + tile * WARPS, kv_head);
  }
}
