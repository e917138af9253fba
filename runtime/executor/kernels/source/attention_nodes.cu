#include "numbers.cuh"
#include "ring.cuh"
#include "tiles.cuh"
#include "rotate.cuh"
#include "attention_arguments.cuh"

// Attention of 17 to 64 tokens of a row, a tree's or one behind the other (docs/kernels.md; its
// numbers are those of attention.cu). A block has eight tokens of a KV head, from their product to
// the output: it rotates its queries and, as every other block does, all keys of the step. All warps
// share the splits that end before the row's start; from there on a warp has a token.

#define WARPS 8
#define THREADS (WARPS * 32)
#define SPLIT 64
#define SPAN 4
// Query rows of a block, in tiles of 16 that SHARE warps have together.
#define ROWS (WARPS * GROUP)
#define HALVES (ROWS < 16 ? 1 : 2)
#define TILES (ROWS < 16 ? 1 : ROWS / 16)
#define SHARE (WARPS / TILES)
#define SCORED (8 / SHARE)
#define SCORES 72
// A row in shared memory: eight of them meet no bank twice.
#define STRIDE (DIM * 2 + 16)
#define STEPS (DIM / 16)
#define PIECES (DIM / 8)
// Pairs of eight columns of the values that a warp has of its tile.
#define OWN ((STEPS + SHARE - 1) / SHARE)
// Slots from the first split on that the row's start is in: less than a split, and all nodes.
#define WINDOW (2 * SPLIT)
// Nodes of which a warp rotates the keys.
#define TURNS (SPLIT / WARPS)
#define WIDTH (DIM + 8)

#include "softmax.cuh"

struct Shared {
  __align__(16) unsigned char keys[WINDOW * STRIDE];
  unsigned char values[WINDOW * STRIDE];
  union {
    unsigned char common[2][SPLIT * STRIDE];  // keys and values of a split
    float o[2][ROWS][WIDTH];                  // sums of whole spans, and of the one behind them
  };
  unsigned char queries[TILES * 16 * STRIDE];
  float scores[TILES][8 * HALVES][SCORES];
  float2 sums[2][ROWS];
  unsigned char path[WARPS][WINDOW];  // where in the window a warp's token has its positions
};

static_assert(sizeof(Shared) == SHARED_BYTES, "what the launch asks for");

__device__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply(c, a[0], a[1], a[2], a[3], b0, b1);
}

// Ask for so many slots of a cache.
__device__ void copy_slots(unsigned char* to, const u16* from, int count) {
  u32 base = shared_address(to);
  for (int i = threadIdx.x; i < count * PIECES; i += THREADS)
    copy_all(base + i / PIECES * STRIDE + i % PIECES * 16, from + (i64)i * 8);
}

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

// Where a token has its positions from the window's first slot on; those that it does not see count
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

#include "nodes_rotation.cuh"
#include "nodes_common.cuh"

typedef Sums<2 * STEPS, 1> Whole;

// What was left of a warp's token.
__device__ void take(const Shared& shared, int part, Whole& to) {
  int at = threadIdx.x / 32 * GROUP + min((int)threadIdx.x % 32 / 4, GROUP - 1);
  float2 sums = shared.sums[part][at];
  to.m[0] = sums.x;
  to.l[0] = sums.y;
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n) {
    float2 pair = *(const float2*)&shared.o[part][at][n * 8 + threadIdx.x % 4 * 2];
    to.o[n][0] = pair.x;
    to.o[n][1] = pair.y;
  }
}

// Add a split of which a warp's token sees so many positions.
__device__ void add_split(const Shared& shared, const unsigned char* path, int seen, Whole& span) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float s[8][4] = {};
  u32 rows[8];
  u32 window = shared_address(shared.keys);
#pragma unroll
  for (int j = 0; j < 8; ++j) rows[j] = window + path[j * 8 + lane % 8] * STRIDE;
  u32 queries = shared_address(shared.queries) +
                (warp * GROUP + min(lane % 8, GROUP - 1)) * STRIDE;
#pragma unroll
  for (int i = 0; i < STEPS; i += 2) {
    // Rows from 8 on are not there.
    u32 a[4], piece = i * 32 + lane / 8 % (i + 1 < STEPS ? 4 : 2) * 16;
    load_tiles(a, queries + piece);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      u32 b[4];
      load_tiles(b, rows[j] + piece);
      multiply(s[j], a[0], 0, a[1], 0, b[0], b[1]);
      if (i + 1 < STEPS) multiply(s[j], a[2], 0, a[3], 0, b[2], b[3]);
    }
  }
  const int of[2] = {seen, 0};
  PowersOf<1> powers(s, of);
  Merge merge(span.m[0], powers.m[0]);
  u32 values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    values[i] = shared_address(shared.values) + path[i * 16 + lane % 16] * STRIDE + lane / 16 * 16;
#pragma unroll
  for (int n = 0; n < STEPS; ++n) {
    float o[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 b[4];
      load_turned_tiles(b, values[i] + n * 32);
      multiply(o[0], powers.p[i], b[0], b[1]);
      multiply(o[1], powers.p[i], b[2], b[3]);
    }
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *(Shared*)memory;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int kv_head = blockIdx.y, row = blockIdx.z, own = blockIdx.x * WARPS + warp;
  int node = min(own, a.seq_len - 1);
  i64 token = (i64)row * a.seq_len + node;
  Rotation rotation = {a, row, kv_head, node};
  i64 start = a.start[row], position = a.positions[token], positions[TURNS];
#pragma unroll
  for (int k = 0; k < TURNS; ++k) positions[k] = a.positions[rotation.token(k)];
  Nodes nodes(a, token, node);
  wait_for_predecessors();
  rotation.load();

  start = start < 0 ? 0 : start > a.kv_len ? a.kv_len : start;
  int splits = (int)start / SPLIT, base = splits * SPLIT, filled = (int)start - base;
  int seen = min(a.kv_len, (int)start + nodes.count());
  i64 cache = ((i64)row * KV_HEADS + kv_head) * a.kv_len * DIM;
  const u16 *keys = a.keys + cache, *values = a.values + cache;
  copy_slots(shared.keys, keys + (i64)base * DIM, filled);
  copy_slots(shared.values, values + (i64)base * DIM, filled);
  if (splits) copy_slots(shared.common[0], keys, SPLIT);
  end_copies();
  if (splits) copy_slots(shared.common[1], values, SPLIT);
  end_copies();
  find_path(shared.path[warp], nodes, node, filled, a.kv_len - 1 - base);
  rotation.store(shared, positions, position, (int)start);
  wait_copies<1>();
  __syncthreads();

  Whole whole, span;
  whole.clear();
  span.clear();
  if (splits) {
    attend_common(shared, keys, values, splits);
    if (splits >= SPAN) take(shared, 0, whole);
    take(shared, 1, span);
  }
  for (int split = splits; split * SPLIT < seen; ++split) {
    if (split > splits && split % SPAN == 0) {
      whole.add(span);
      span.clear();
    }
    add_split(shared, shared.path[warp] + (split - splits) * SPLIT, seen - split * SPLIT, span);
  }
  whole.add(span);
  float share = whole.l[0] > 0.0f ? __frcp_rn(whole.l[0]) : 0.0f;
  int g = lane / 4;
  if (own >= a.seq_len || g >= GROUP) return;
  u32* out = (u32*)(a.out + (token * QUERY_HEADS + kv_head * GROUP + g) * DIM) + lane % 4;
#pragma unroll
  for (int n = 0; n < 2 * STEPS; ++n)
    out[n * 4] = pack(__fmul_rn(whole.o[n][0], share), __fmul_rn(whole.o[n][1], share));
}
