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

// The splits of a step of nodes that end before the row's start.

typedef Sums<2 * OWN> Common;

// Ask for the first split of some.
__device__ void ask_common(Shared& shared, const u16* keys, const u16* values, int split) {
  if (split >= 0) copy_slots(shared.common[0], keys + (i64)split * SPLIT * DIM, SPLIT);
  end_copies();
  if (split >= 0) copy_slots(shared.common[1], values + (i64)split * SPLIT * DIM, SPLIT);
  end_copies();
}

// The splits [first, end) of a span, all slots of which all tokens see; the first is asked for.
__device__ void attend_common(Shared& shared, const u16* keys, const u16* values, int first,
                              int end, Common& span) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = warp / SHARE, share = warp % SHARE;
  u32 held[STEPS][4], rows = shared_address(shared.queries) +
                             (tile * 16 + lane % 16) * STRIDE + lane / 16 * 16;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    load_tiles(held[i], rows + i * 32);
    if (HALVES == 1) held[i][1] = held[i][3] = 0;
  }
  span.clear();
  u32 score_rows = shared_address(shared.common[0]) + (share * SCORED * 8 + lane % 8) * STRIDE;
  u32 value_rows =
      shared_address(shared.common[1]) + lane % 16 * STRIDE + lane / 16 * 16 + share * OWN * 32;
  for (int split = first; split < end; ++split) {
    float own[SCORED][4] = {}, s[8][4];
    wait_copies<1>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STEPS; i += 2)
#pragma unroll
      for (int j = 0; j < SCORED; ++j) {
        u32 b[4];
        load_tiles(b, score_rows + j * 8 * STRIDE + i * 32 +
                          lane / 8 % (i + 1 < STEPS ? 4 : 2) * 16);
        multiply(own[j], held[i], b[0], b[1]);
        if (i + 1 < STEPS) multiply(own[j], held[i + 1 < STEPS ? i + 1 : i], b[2], b[3]);
      }
    put_scores(shared.scores[tile], lane, share, own);
    __syncthreads();
    if (split + 1 < end)
      copy_slots(shared.common[0], keys + (i64)(split + 1) * SPLIT * DIM, SPLIT);
    end_copies();
    take_scores(shared.scores[tile], lane, s);
    const int seen[2] = {SPLIT, SPLIT};
    Powers powers(s, seen);
    wait_copies<1>();
    __syncthreads();
    Merge merge[2] = {Merge(span.m[0], powers.m[0]), Merge(span.m[HALVES - 1], powers.m[HALVES - 1])};
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
      if (STEPS % SHARE && share * OWN + n >= STEPS) break;
      float o[2][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weigh_sixteen(powers.p[i], value_rows + i * 16 * STRIDE + n * 32, o);
#pragma unroll
      for (int c = 0; c < 2 * HALVES; ++c)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& sum = span.o[2 * n + k][c];
          sum = merge[c / 2].of(sum, o[k][c]);
        }
    }
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      span.m[half] = merge[half].top;
      span.l[half] = merge[half].of(span.l[half], powers.l[half]);
    }
    __syncthreads();
    if (split + 1 < end)
      copy_slots(shared.common[1], values + (i64)(split + 1) * SPLIT * DIM, SPLIT);
    end_copies();
  }
}

// Leave a span's sums, float [ROWS, width], and their maxima and sums.
__device__ void leave(const Common& span, float* o, float2* sums, int width) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = warp / SHARE, share = warp % SHARE;
  int column = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    int at = tile * 16 + lane / 4 + 8 * half;
#pragma unroll
    for (int n = 0; n < 2 * OWN; ++n) {
      int eight = share * 2 * OWN + n;
      if (STEPS % SHARE && eight >= PIECES) break;
      *(float2*)(o + at * width + eight * 8 + column) =
          make_float2(span.o[n][2 * half], span.o[n][2 * half + 1]);
    }
    if (share == 0 && column == 0) sums[at] = make_float2(span.m[half], span.l[half]);
  }
}

// The splits from the row's start on of a warp's token, whose positions it selects from all nodes.

// The nodes of a step that a token sees, itself among them, as bits.
struct Nodes {
  u32 low, high;

  __device__ Nodes(const Arguments& a, i64 token, int node) {
    low = ~0u >> max(0, 31 - node);
    high = node < 32 ? 0 : ~0u >> (63 - node);
    if (a.mask) {
      int words = (a.seq_len + 31) / 32;
      low = a.mask[token * words];
      high = words > 1 ? a.mask[token * words + 1] : 0;
    }
  }
  __device__ int count() const { return __popc(low) + __popc(high); }
};

// Places of a token's positions from the window's first slot on; those that it does not see count
// as the token itself.
__device__ void find_path(unsigned char* path, const Nodes& nodes, int node, int filled, int most) {
  int lane = threadIdx.x % 32;
  u32 before = (1u << lane) - 1;
  for (int place = lane; place < WINDOW; place += 32)
    path[place] = place < filled ? place : min(filled + node, most);
  __syncwarp();
  if (nodes.low >> lane & 1) path[filled + __popc(nodes.low & before)] = min(filled + lane, most);
  if (nodes.high >> lane & 1)
    path[filled + __popc(nodes.low) + __popc(nodes.high & before)] = min(filled + 32 + lane, most);
  __syncwarp();
}

typedef Sums<2 * STEPS, 1> Whole;

// Sums that were left of a warp's token.
__device__ void take(const Shared& shared, Whole& to) {
  int at = threadIdx.x / 32 * GROUP + min((int)threadIdx.x % 32 / 4, GROUP - 1);
  to.m[0] = shared.sums[at].x;
  to.l[0] = shared.sums[at].y;
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n) {
    float2 pair = *(const float2*)&shared.o[at][n * 8 + threadIdx.x % 4 * 2];
    to.o[n][0] = pair.x;
    to.o[n][1] = pair.y;
  }
}

// Leave a warp's token's sums.
__device__ void leave(const Whole& from, float* o, float2* sums) {
  int at = threadIdx.x / 32 * GROUP + threadIdx.x % 32 / 4;
  if (threadIdx.x % 32 / 4 >= GROUP) return;
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n)
    *(float2*)(o + at * DIM + n * 8 + threadIdx.x % 4 * 2) =
        make_float2(from.o[n][0], from.o[n][1]);
  if (threadIdx.x % 4 == 0) sums[at] = make_float2(from.m[0], from.l[0]);
}

// Add a split of which a warp's token sees so many positions, at most SIXTEENS times sixteen.
template <int SIXTEENS>
__device__ void add_sixteens(const Shared& shared, const unsigned char* path, int seen,
                             Whole& span) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float s[8][4] = {};
  u32 rows[2 * SIXTEENS], values[SIXTEENS];
#pragma unroll
  for (int j = 0; j < 2 * SIXTEENS; ++j)
    rows[j] = shared_address(shared.keys) + path[j * 8 + lane % 8] * STRIDE;
  u32 queries = shared_address(shared.queries) +
                (warp * GROUP + min(lane % 8, GROUP - 1)) * STRIDE;
#pragma unroll 1
  for (int i = 0; i < STEPS; i += 2) {
    // Rows from 8 on are not there.
    u32 a[4], piece = i * 32 + lane / 8 % (i + 1 < STEPS ? 4 : 2) * 16;
    load_tiles(a, queries + piece);
#pragma unroll
    for (int j = 0; j < 2 * SIXTEENS; ++j) {
      u32 b[4];
      load_tiles(b, rows[j] + piece);
      multiply(s[j], a[0], 0, a[1], 0, b[0], b[1]);
      if (i + 1 < STEPS) multiply(s[j], a[2], 0, a[3], 0, b[2], b[3]);
    }
  }
  const int of[2] = {seen, 0};
  PowersOf<1> powers(s, of);
  Merge merge(span.m[0], powers.m[0]);
#pragma unroll
  for (int i = 0; i < SIXTEENS; ++i)
    values[i] = shared_address(shared.values) + path[i * 16 + lane % 16] * STRIDE + lane / 16 * 16;
#pragma unroll
  for (int n = 0; n < STEPS; ++n) {
    float o[2][4] = {};
#pragma unroll
    for (int i = 0; i < SIXTEENS; ++i) weigh_sixteen(powers.p[i], values[i] + n * 32, o);
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& sum = span.o[2 * n + k][c];
        sum = merge.of(sum, o[k][c]);
      }
  }
  span.m[0] = merge.top;
  span.l[0] = merge.of(span.l[0], powers.l[0]);
}

__device__ void add_split(const Shared& shared, const unsigned char* path, int seen, Whole& span) {
  if (seen <= 16)
    add_sixteens<1>(shared, path, seen, span);
  else if (seen <= 48)
    add_sixteens<3>(shared, path, seen, span);
  else
    add_sixteens<4>(shared, path, seen, span);
}

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
