// Attention of the tokens of a step over a row's cache (docs/kernels.md, specified by
// forms_attention.py): flash attention (Dao, 2023) by splits of 64 positions and spans of four.
//
// The query rows of a KV head are its tokens' heads, token by token. A block has TILES tiles of 16
// of them; SHARE warps have one tile together: each computes the scores of its part of a split's
// positions, all exchange them, and each has its part of the columns of the values.
//
// FUSED: one token a row, whose rotation and cache write happen here. TREE: tokens see each other
// by a packed mask. WHOLE: a block takes all positions; else a block takes *units* of them, splits
// or spans, and the last block of a tile merges what all have left in `partial`.

#define WARPS 4
#define THREADS (WARPS * 32)
#define SPLIT 64
#define SPAN 4
#define TILES (WARPS / SHARE)
#define ROWS (TILES * 16)
#define GROUP (QUERY_HEADS / KV_HEADS)
#define HEADS (QUERY_HEADS + 2 * KV_HEADS)
#define HALVES (FUSED && GROUP <= 8 ? 1 : 2)
// Whether a warp keeps its queries in registers.
#define HELD (FUSED || (!WHOLE && DIM <= 128))
// A row in shared memory: eight of them meet no bank twice.
#define STRIDE (DIM * 2 + 16)
#define STEPS (DIM / 16)
#define PIECES (DIM / 8)
// Pairs of eight columns of the values that a warp has.
#define OWN ((STEPS + SHARE - 1) / SHARE)
// Keys and values of a split have one buffer in turns where two are too large.
#define BUFFERS (DIM <= 128 ? 2 : 1)
#define SCORES 72
// Nodes of a tree whose keys or values fit into a buffer.
#define NEAR (BUFFERS == 2 ? SPLIT : 0)

#include "numbers.cuh"
#include "ring.cuh"
#include "tiles.cuh"
#include "rotate.cuh"
#include "softmax.cuh"

// Blocks that a multiprocessor shall have at a time.
#define RESIDENT (DIM > 128 || SHARE < 4 ? 2 : FUSED ? 4 : 3)

typedef long long i64;

struct Arguments {
  const float* qkv;      // [T, HEADS, DIM]: FUSED, and for `rotate`
  u16* queries;      // [T, QUERY_HEADS, DIM], rotated: not FUSED
  u16* keys;         // [batch, KV_HEADS, kv_len, DIM]
  u16* values;
  const i64* start;      // [batch]
  const i64* positions;  // [batch, seq_len]
  const float* cos;      // [rows of a table, ROTARY / 2], or such for each row
  const float* sin;
  const u16* q_gain;  // [DIM], or null
  const u16* k_gain;
  const u32* mask;  // [batch, seq_len, words]
  u16* out;     // [T, QUERY_HEADS, DIM]
  float* partial;   // [tiles * batch, KV_HEADS, units, rows of a block, DIM]
  float2* sums;     // the same without DIM: maximum and sum
  u32* tickets;     // [tiles * batch, KV_HEADS], 0 before and after
  float eps;
  float scale;
  int batch;
  int seq_len;
  int kv_len;
  int table_rows;  // of each row's own tables, 0 where all share one
  int units;       // most units of a tile
  int fine;        // most splits that are units by themselves
};

__device__ int first_slot(const Arguments& a, int row) {
  i64 start = a.start[row];
  return start < 0 ? 0 : start > a.kv_len ? a.kv_len : (int)start;
}

__device__ const float* cosines(const Arguments& a, int row, int token) {
  return angles_of(a.cos, a.positions[token], a.table_rows ? row : 0, a.table_rows);
}
__device__ const float* sines(const Arguments& a, int row, int token) {
  return angles_of(a.sin, a.positions[token], a.table_rows ? row : 0, a.table_rows);
}

// A warp for each head of each token: queries go to `queries`, keys and values into the caches.
extern "C" __global__ void __launch_bounds__(THREADS) rotate(const __grid_constant__ Arguments a) {
  int at = blockIdx.x * WARPS + threadIdx.x / 32;
  int token = at / HEADS, head = at % HEADS;
  bool there = token < a.batch * a.seq_len;
  int row = there ? token / a.seq_len : 0;
  int slot = first_slot(a, row) + token - row * a.seq_len;
  Angles angles;
  if (there && head < QUERY_HEADS + KV_HEADS)
    angles.load(cosines(a, row, token), sines(a, row, token));
  wait_for_predecessors();
  bool query = head < QUERY_HEADS;
  if (!there || (!query && slot >= a.kv_len)) return;
  Head own;
  own.load(a.qkv + (i64)at * DIM);
  const u16* gain = query ? a.q_gain : a.k_gain;
  bool value = head >= QUERY_HEADS + KV_HEADS;
  if (!value) {
    if (gain) own.normalise(gain, a.eps);
    own.turn(angles);
  }
  int kv_head = (head - QUERY_HEADS) % KV_HEADS;
  i64 cached = (((i64)row * KV_HEADS + kv_head) * a.kv_len + slot) * DIM;
  if (query)
    own.store(a.queries + ((i64)token * QUERY_HEADS + head) * DIM, a.scale);
  else
    own.store((value ? a.values : a.keys) + cached, 1.0f);
}

struct Shared {
  __align__(16) unsigned char buffers[BUFFERS][SPLIT * STRIDE];
#if SHARE > 1
  // Whoever looks for pieces of a path has done with the scores.
  union {
    float scores[TILES][16][SCORES];
    uint4 pieces[WARPS][32];
  };
#elif TREE
  uint4 pieces[WARPS][32];
#endif
#if FUSED
  __align__(16) unsigned char queries[16 * STRIDE];
  __align__(16) u16 newest[2][DIM];
#endif
#if TREE
  unsigned short paths[ROWS][SPLIT];  // places of a token's own positions of a split
  int seen[ROWS];                     // positions that a token sees
#endif
};

// What a block has to do, the same for all of its threads.
struct Block {
  const Arguments& a;
  Shared& shared;
  int row, kv_head, tile, first_token, tokens;
  int start;   // slots that were filled before this step
  int common;  // positions whose slot is the same number for all tokens of the block
  int most;    // positions that some token sees
  bool causal;
  const u16* keys;
  const u16* values;

  __device__ Block(const Arguments& a, Shared& shared) : a(a), shared(shared) {
    kv_head = blockIdx.y;
    row = blockIdx.z % a.batch;
    // Those who see most come first.
    tile = (gridDim.z - 1 - blockIdx.z) / a.batch;
    start = first_slot(a, row);
    first_token = tile * ROWS / GROUP;
    tokens = min(a.seq_len, (tile * ROWS + ROWS - 1) / GROUP + 1) - first_token;
    i64 cache = ((i64)row * KV_HEADS + kv_head) * a.kv_len * DIM;
    keys = a.keys + cache;
    values = a.values + cache;
    most = min(a.kv_len, start + first_token + tokens);
    common = most;
    causal = true;
#if TREE
    int own = threadIdx.x, count = 0;
    if (own < tokens) {
      int words = (a.seq_len + 31) / 32;
      const u32* mask = a.mask + ((i64)row * a.seq_len + first_token + own) * words;
      for (int i = 0; i < words; ++i) count += __popc(mask[i]);
      shared.seen[own] = min(a.kv_len, start + count);
    }
    causal = __syncthreads_and(own >= tokens || count == first_token + own + 1);
    if (!causal) {
      common = start;
      most = 0;
      for (int i = 0; i < tokens; ++i) most = max(most, shared.seen[i]);
    }
#endif
  }

  // Positions that a token of the block sees.
  __device__ int seen(int token) const {
#if TREE
    return token < tokens ? shared.seen[token] : 0;
#else
    return token < tokens ? min(a.kv_len, start + first_token + token + 1) : 0;
#endif
  }

  // Ask for the positions [from, to) of a split; those from `end` on become zeros.
  __device__ void load(int buffer, const u16* cache, int split, int from, int to,
                       int end) const {
    u32 base = shared_address(shared.buffers[buffer]);
#pragma unroll 2
    for (int i = threadIdx.x; i < SPLIT * PIECES; i += THREADS) {
      int place = i / PIECES, piece = i % PIECES, position = split * SPLIT + place;
      bool there = position >= from && position < to;
      // The newest is not in the cache yet.
      if (FUSED && position == start && start < common) continue;
      if (there || position >= end)
        copy_ahead(base + place * STRIDE + piece * 16,
            cache + (there ? (i64)position * DIM + piece * 8 : 0), there);
    }
#if FUSED
    int place = start - split * SPLIT;
    if (to > start && place >= 0 && place < SPLIT && threadIdx.x < PIECES)
      ((uint4*)(shared.buffers[buffer] + place * STRIDE))[threadIdx.x] =
          ((const uint4*)shared.newest[cache == values])[threadIdx.x];
#endif
  }

  // Ask for the keys or values of a split, as a group; it is empty where there is no split.
  __device__ void load(bool value, int split) const {
    if (split >= 0)
      load(value ? BUFFERS - 1 : 0, value ? values : keys, split, 0, common, common);
    end_copies();
  }
};

// The queries of a warp's tile as the left operand.
struct Queries {
  u32 held[HELD ? STEPS : 1][4];
  const u32* from[2];

  // From [T, QUERY_HEADS, DIM]; those of rows that are not there are null.
  __device__ void load(const Block& block, int first_row) {
    const Arguments& args = block.a;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = first_row + threadIdx.x % 32 / 4 + 8 * half, token = row / GROUP;
      i64 head = ((i64)block.row * args.seq_len + token) * QUERY_HEADS + block.kv_head * GROUP +
                 row % GROUP;
      from[half] = token < args.seq_len
                       ? (const u32*)(args.queries + head * DIM) + threadIdx.x % 4
                       : nullptr;
    }
#pragma unroll
    for (int i = 0; i < (HELD ? STEPS : 0); ++i) fetch(held[i], i);
  }

  // From 16 rows in shared memory.
  __device__ void load(const unsigned char* rows) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < (HELD ? STEPS : 0); ++i) {
      load_tiles(held[i], shared_address(rows) + lane % 16 * STRIDE + i * 32 + lane / 16 * 16);
      if (HALVES == 1) held[i][1] = held[i][3] = 0;
    }
  }

  __device__ void fetch(u32 (&a)[4], int i) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int k = 0; k < 2; ++k)
        a[2 * k + half] = from[half] ? read_word(from[half] + i * 8 + k * 4) : 0;
  }

  // What serves a step of 16 columns.
  __device__ void step(u32 (&a)[4], int i) const {
    if (!HELD) return fetch(a, i);
#pragma unroll
    for (int k = 0; k < 4; ++k) a[k] = held[HELD ? i : 0][k];
  }
};

__device__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply(c, a[0], a[1], a[2], a[3], b0, b1);
}

// A warp's place: 16 rows that it shares with SHARE - 1 others.
struct Place {
  int lane, tile, share, first_row;
  int token[2];  // of rows g and g + 8, counted from the block's first
  int seen[2];

  __device__ Place(const Block& block) {
    lane = threadIdx.x % 32;
    tile = threadIdx.x / 32 / SHARE;
    share = threadIdx.x / 32 % SHARE;
    first_row = block.tile * ROWS + tile * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      token[half] = (first_row + lane / 4 + 8 * half) / GROUP - block.first_token;
      seen[half] = block.seen(token[half]);
    }
  }
};

#define SCORED (8 / SHARE)

// Scores of a warp's part of a split, from buffer 0.
__device__ void score(const Block& block, const Place& at, const Queries& queries,
                      float (&s)[SCORED][4]) {
  u32 base = shared_address(block.shared.buffers[0]) +
             (at.share * SCORED * 8 + at.lane % 8) * STRIDE;
#pragma unroll
  for (int j = 0; j < SCORED; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
#pragma unroll
  for (int i = 0; i < STEPS; i += 2) {
    u32 a[4], next[4];
    queries.step(a, i);
    if (i + 1 < STEPS) queries.step(next, i + 1);
#pragma unroll
    for (int j = 0; j < SCORED; ++j) {
      u32 b[4];
      load_tiles(b, base + j * 8 * STRIDE + i * 32 + at.lane / 8 % (i + 1 < STEPS ? 4 : 2) * 16);
      multiply(s[j], a, b[0], b[1]);
      if (i + 1 < STEPS) multiply(s[j], next, b[2], b[3]);
    }
  }
}

// Let all warps of a tile have all scores of a split. Nobody reads buffer 0 any more afterwards.
__device__ void exchange(const Block& block, const Place& at, const float (&own)[SCORED][4],
                         float (&s)[8][4]) {
#if SHARE > 1
  float(&scores)[16][SCORES] = block.shared.scores[at.tile];
  int g = at.lane / 4, column = at.lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < SCORED; ++j)
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
      *(float2*)&scores[g + 8 * half][(at.share * SCORED + j) * 8 + column] =
          make_float2(own[j][2 * half], own[j][2 * half + 1]);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float2 pair = *(const float2*)&scores[g + 8 * half][j * 8 + column];
      s[j][2 * half] = pair.x;
      s[j][2 * half + 1] = pair.y;
    }
#else
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) s[j][c] = own[j][c];
  __syncthreads();
#endif
}

#if TREE
// Splits from a row's start on, where every token of a tree has a path of its own. Tokens of a tile
// go one after the other: scores are taken over for the token's rows alone, and powers of other
// rows are zeros, which change no sum.
struct Path {
  const Block& block;
  const Place& at;
  int split;
  bool near;  // the tree's keys, then its values, are in buffer 0
  int low, high;

  __device__ Path(const Block& block, const Place& at, int split)
      : block(block), at(at), split(split), near(block.a.seq_len <= NEAR) {
    low = at.first_row / GROUP - block.first_token;
    high = min(block.tokens, (at.first_row + 15) / GROUP - block.first_token + 1);
  }

  // Which places in the tree the block's tokens have at a split's positions.
  __device__ void find() const {
    const Arguments& a = block.a;
    int own = threadIdx.x, position = block.start - split * SPLIT, words = (a.seq_len + 31) / 32;
    if (own < block.tokens) {
      const u32* mask =
          a.mask + ((i64)block.row * a.seq_len + block.first_token + own) * words;
      for (int i = 0; i < words; ++i)
        for (u32 bits = mask[i]; bits; bits &= bits - 1, ++position)
          if (position >= 0 && position < SPLIT)
            block.shared.paths[own][position] =
                min(i * 32 + __ffs(bits) - 1, a.kv_len - 1 - block.start);
    }
    __syncthreads();
  }

  // Bring the tree's keys or values.
  __device__ void load(const u16* cache) const {
    if (near) {
      u32 base = shared_address(block.shared.buffers[0]);
      int nodes = min(block.a.seq_len, block.a.kv_len - block.start);
      for (int i = threadIdx.x; i < nodes * PIECES; i += THREADS)
        copy_ahead(base + i / PIECES * STRIDE + i % PIECES * 16,
            cache + ((i64)block.start + i / PIECES) * DIM + i % PIECES * 8, true);
    }
    end_copies();
  }

  // A lane's row of four tiles: `byte` of what the token has at a position.
  __device__ u32 row(const u16* cache, int token, int position, int byte) const {
    int place = position - split * SPLIT;
    bool own = position >= block.start;
    int node = own ? block.shared.paths[token][place] : 0;
    if (near)
      return shared_address(block.shared.buffers[own ? 0 : BUFFERS - 1]) +
             (own ? node : place) * STRIDE + byte;
    i64 slot = own ? block.start + node : position;
    uint4* piece = block.shared.pieces[threadIdx.x / 32] + at.lane;
    __syncwarp();
    *piece = __ldcg((const uint4*)((const char*)(cache + slot * DIM) + byte));
    __syncwarp();
    return shared_address(piece);
  }

  __device__ void score(const Queries& queries, float (&s)[SCORED][4]) const {
    for (int token = low; token < high; ++token) {
      int seen = block.shared.seen[token];
#pragma unroll
      for (int j = 0; j < SCORED; ++j) {
        int first = split * SPLIT + (at.share * SCORED + j) * 8;
        if (seen <= block.start || first + 8 <= block.start || first >= seen) continue;
        int position = max(block.start, min(first + at.lane % 8, seen - 1));
        float own[4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i += 2) {
          u32 a[4], b[4];
          int column = at.lane / 8 % (i + 1 < STEPS ? 4 : 2) * 16;
          load_tiles(b, row(block.keys, token, position, i * 32 + column));
          queries.step(a, i);
          multiply(own, a, b[0], b[1]);
          if (i + 1 == STEPS) continue;
          queries.step(a, i + 1);
          multiply(own, a, b[2], b[3]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (at.token[c / 2] == token && first + at.lane % 4 * 2 + c % 2 >= block.start)
            s[j][c] = own[c];
      }
    }
  }

  // Add the product of powers and values at 16 positions from `first` on.
  __device__ void weigh(const u32 (&p)[4], int first, int pair, float (&o)[2][4]) const {
    for (int token = low; token < high; ++token) {
      int seen = block.shared.seen[token];
      if (first >= seen) continue;
      int position = min(first + at.lane % 16, seen - 1);
      u32 a[4], b[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) a[k] = at.token[k % 2] == token ? p[k] : 0;
      load_turned_tiles(b, row(block.values, token, position, pair * 32 + at.lane / 16 * 16));
      multiply(o[0], a, b[0], b[1]);
      multiply(o[1], a, b[2], b[3]);
    }
  }
};
#else
struct Path {
  __device__ Path(const Block&, const Place&, int) {}
  __device__ void find() const {}
  __device__ void load(const u16*) const {}
  __device__ void score(const Queries&, float (&)[SCORED][4]) const {}
  __device__ void weigh(const u32 (&)[4], int, int, float (&)[2][4]) const {}
};
#endif

typedef Sums<2 * OWN> Own;

// Add a split to the span: its values times the powers, by pairs of eight columns.
__device__ void weigh(const Block& block, const Place& at, const Path& path, bool apart, int split,
                      const Powers& powers, Own& span) {
  u32 base = shared_address(block.shared.buffers[BUFFERS - 1]) + at.lane % 16 * STRIDE +
             at.lane / 16 * 16;
  Merge merge[2] = {Merge(span.m[0], powers.m[0]),
                    Merge(span.m[HALVES - 1], powers.m[HALVES - 1])};
#pragma unroll
  for (int n = 0; n < OWN; ++n) {
    int pair = at.share * OWN + n;
    if (STEPS % SHARE && pair >= STEPS) break;
    float o[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32(&p)[4] = powers.p[i];
      int first = split * SPLIT + i * 16;
      if (apart && first + 16 > block.start) {
        path.weigh(p, first, pair, o);
        continue;
      }
      u32 b[4];
      load_turned_tiles(b, base + i * 16 * STRIDE + pair * 32);
      multiply(o[0], p, b[0], b[1]);
      multiply(o[1], p, b[2], b[3]);
    }
#pragma unroll
    for (int c = 0; c < 2 * HALVES; ++c)
#pragma unroll
      for (int k = 0; k < 2; ++k) span.o[2 * n + k][c] = merge[c / 2].of(span.o[2 * n + k][c], o[k][c]);
  }
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    span.m[half] = merge[half].top;
    span.l[half] = merge[half].of(span.l[half], powers.l[half]);
  }
}

__device__ float inverse(float l) { return l > 0.0f ? __frcp_rn(l) : 0.0f; }

// Where a row's heads go.
__device__ u16* output(const Block& block, int row) {
  i64 token = (i64)block.row * block.a.seq_len + row / GROUP;
  return block.a.out + (token * QUERY_HEADS + block.kv_head * GROUP + row % GROUP) * DIM;
}

__device__ void finish(const Block& block, const Place& at, const Own& whole) {
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    int row = at.first_row + at.lane / 4 + 8 * half;
    if (row >= block.a.seq_len * GROUP) continue;
    float share = inverse(whole.l[half]);
    u32* out = (u32*)output(block, row) + at.lane % 4;
#pragma unroll
    for (int n = 0; n < 2 * OWN; ++n) {
      int column = at.share * 2 * OWN + n;
      if (STEPS % SHARE && column >= PIECES) break;
      out[column * 4] = pack(__fmul_rn(whole.o[n][2 * half], share),
                                __fmul_rn(whole.o[n][2 * half + 1], share));
    }
  }
}

// The first of a unit's rows among the partial sums of all.
__device__ i64 partial_of(const Block& block, int unit) {
  return (((i64)blockIdx.z * KV_HEADS + block.kv_head) * block.a.units + unit) * min(ROWS, block.a.seq_len * GROUP);
}

__device__ void leave(const Block& block, const Place& at, int unit, const Own& span) {
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    int row = at.tile * 16 + at.lane / 4 + 8 * half;
    if (block.tile * ROWS + row >= block.a.seq_len * GROUP) continue;
    i64 to = partial_of(block, unit) + row;
#pragma unroll
    for (int n = 0; n < 2 * OWN; ++n) {
      int column = at.share * 2 * OWN + n;
      if (STEPS % SHARE && column >= PIECES) break;
      *(float2*)(block.a.partial + to * DIM + column * 8 + at.lane % 4 * 2) =
          make_float2(span.o[n][2 * half], span.o[n][2 * half + 1]);
    }
    if (at.share == 0 && at.lane % 4 == 0)
      block.a.sums[to] = make_float2(span.m[half], span.l[half]);
  }
}

// True for the last of `blocks` blocks of a tile that come here; it sees what the others left.
__device__ bool is_last(const Block& block, int blocks) {
  __shared__ bool last;
  u32* ticket = block.a.tickets + blockIdx.z * KV_HEADS + block.kv_head;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) == blocks - 1;
    if (last) *ticket = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

#define AHEAD (2 * SPAN)

// Merge the units of a tile in ascending order: into spans if they are splits, those into the whole.
__device__ void merge(const Block& block, int units, bool splits) {
  int stored = min(ROWS, block.a.seq_len * GROUP);
  int rows = min(ROWS, block.a.seq_len * GROUP - block.tile * ROWS);
  for (int i = threadIdx.x; i < rows * (DIM / 2); i += THREADS) {
    int row = i / (DIM / 2), column = i % (DIM / 2) * 2;
    i64 first = partial_of(block, 0) + row;
    float m = MINUS_INFINITY, l = 0.0f, x = 0.0f, y = 0.0f;
    for (int unit = 0; unit < units; unit += AHEAD) {
      float2 sum[AHEAD], o[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {
        sum[k] = make_float2(MINUS_INFINITY, 0.0f);
        o[k] = make_float2(0.0f, 0.0f);
        if (unit + k >= units) continue;
        i64 from = first + (i64)(unit + k) * stored;
        sum[k] = __ldcg(block.a.sums + from);
        o[k] = __ldcg((const float2*)(block.a.partial + from * DIM + column));
      }
#pragma unroll
      for (int k = 0; k < AHEAD; ++k)
        if (splits && k % SPAN) {
          const int to = k / SPAN * SPAN;
          Merge merge(sum[to].x, sum[k].x);
          sum[to] = make_float2(merge.top, merge.of(sum[to].y, sum[k].y));
          o[to] = make_float2(merge.of(o[to].x, o[k].x), merge.of(o[to].y, o[k].y));
          sum[k] = make_float2(MINUS_INFINITY, 0.0f);
          o[k] = make_float2(0.0f, 0.0f);
        }
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {
        Merge merge(m, sum[k].x);
        m = merge.top;
        l = merge.of(l, sum[k].y);
        x = merge.of(x, o[k].x);
        y = merge.of(y, o[k].y);
      }
    }
    float share = inverse(l);
    *(u32*)(output(block, block.tile * ROWS + row) + column) =
        pack(__fmul_rn(x, share), __fmul_rn(y, share));
  }
}

#if FUSED
// Rotate the queries of this row and KV head, and its new key and value if this block has their
// split `own`, into the cache, `newest` and, where it is there, the split in shared memory.
__device__ void rotate_newest(const Block& block, const Angles& angles, bool newest, int split) {
  const Arguments& a = block.a;
  int place = block.start - split * SPLIT;
  bool here = place >= 0 && place < SPLIT;
  for (int i = threadIdx.x / 32; i < GROUP + (newest ? 2 : 0); i += WARPS) {
    bool query = i < GROUP, value = i > GROUP;
    int head = query ? block.kv_head * GROUP + i
                     : QUERY_HEADS + (value ? KV_HEADS : 0) + block.kv_head;
    Head own;
    own.load(a.qkv + ((i64)block.row * HEADS + head) * DIM);
    const u16* gain = query ? a.q_gain : a.k_gain;
    if (!value) {
      if (gain) own.normalise(gain, a.eps);
      own.turn(angles);
    }
    if (query) {
      own.store((u16*)(block.shared.queries + i * STRIDE), a.scale);
      continue;
    }
    own.store(block.shared.newest[value], 1.0f);
    own.store((u16*)(value ? block.values : block.keys) + (i64)block.start * DIM, 1.0f);
    if (here && (BUFFERS == 2 || !value))
      own.store((u16*)(block.shared.buffers[value] + place * STRIDE), 1.0f);
  }
  __syncthreads();
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend(const __grid_constant__ Arguments a) {
  __shared__ Shared shared;
  Block block(a, shared);
  int splits = max(1, (block.most + SPLIT - 1) / SPLIT);
  int per = !WHOLE && splits <= a.fine ? 1 : SPAN;
  int units = (splits + per - 1) / per, unit = blockIdx.x, first = unit * per;
  if (unit >= units) return;
  Place at(block);
  // What the step does not write.
  int filled = min(block.start, block.common);
  block.load(0, block.keys, first, 0, filled, block.common);
  end_copies();
  if (BUFFERS == 2) {
    block.load(1, block.values, first, 0, filled, block.common);
    end_copies();
  }
  Queries queries;
  bool fresh = false;
#if FUSED
  Angles angles;
  angles.load(cosines(a, block.row, block.row), sines(a, block.row, block.row));
  int newest = block.start / SPLIT / per % gridDim.x;
  wait_for_predecessors();
  rotate_newest(block, angles, block.start < a.kv_len && newest == unit, first);
  queries.load(shared.queries);
#else
  wait_for_predecessors();
  fresh = block.common > block.start && first * SPLIT + SPLIT > block.start;
  if (fresh) {
    block.load(0, block.keys, first, block.start, block.common, a.kv_len + SPLIT);
    if (BUFFERS == 2)
      block.load(1, block.values, first, block.start, block.common, a.kv_len + SPLIT);
    end_copies();
  }
  queries.load(block, at.first_row);
#endif
  Own span, whole;
  whole.clear();
  for (; unit < units; unit += gridDim.x) {
    int end = min(splits, unit * per + per), following = unit + gridDim.x;
    span.clear();
    for (int split = unit * per; split < end; ++split) {
      int next = split + 1 < end ? split + 1 : following < units ? following * per : -1;
      bool apart = TREE && !block.causal && split * SPLIT + SPLIT > block.start;
      Path path(block, at, split);
      float own[SCORED][4], s[8][4];
      if (fresh || BUFFERS == 1)
        wait_copies<0>();
      else
        wait_copies<1>();
      fresh = false;
      __syncthreads();
      score(block, at, queries, own);
      if (apart) {
        // It takes the place of the split's keys, and ends with all that was asked for.
        path.find();
        path.load(block.keys);
        wait_copies<0>();
        __syncthreads();
        path.score(queries, own);
        __syncthreads();
      }
      exchange(block, at, own, s);
      if (BUFFERS == 1)
        block.load(true, split);
      else if (apart)
        path.load(block.values);
      else
        block.load(false, next);
      int seen[2] = {at.seen[0] - split * SPLIT, at.seen[1] - split * SPLIT};
      Powers powers(s, seen);
      if (apart || BUFFERS == 1)
        wait_copies<0>();
      else
        wait_copies<1>();
      __syncthreads();
      weigh(block, at, path, apart, split, powers, span);
      __syncthreads();
      if (apart || BUFFERS == 1) block.load(false, next);
      if (BUFFERS == 2) block.load(true, next);
    }
    if (WHOLE)
      whole.add(span);
    else if (units == 1)
      finish(block, at, span);
    else
      leave(block, at, unit, span);
  }
  if (WHOLE)
    finish(block, at, whole);
  else if (units > 1 && is_last(block, min(units, (int)gridDim.x))) merge(block, units, per == 1);
}
