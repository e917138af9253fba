// What a block of attention is told, and what it has in shared memory.

#define WARPS 4
#define THREADS (WARPS * 32)
#define SPLIT 64
#define SPAN 4
#define TILES (WARPS / SHARE)
#define ROWS (TILES * 16)
#define GROUP (QUERY_HEADS / KV_HEADS)
#define HEADS (QUERY_HEADS + 2 * KV_HEADS)
// Whether a warp keeps its queries in registers.
#define HELD (SINGLE || DIM <= 128)
// A row in shared memory: eight of them meet no bank twice.
#define STRIDE (DIM * 2 + 16)
#define STEPS (DIM / 16)
#define PIECES (DIM / 8)
// Pairs of eight columns of the values that a warp has.
#define OWN ((STEPS + SHARE - 1) / SHARE)
// Keys and values of a split have one buffer in turns where two are too large.
#define BUFFERS (DIM <= 128 ? 2 : 1)
#define VALUES (BUFFERS - 1)
#define SCORES 72
// Heads that a warp rotates at a time.
#define BATCH (!SINGLE ? (DIM > 128 ? 2 : 8) : GROUP <= 2 ? 1 : GROUP <= 6 ? 2 : 4)
// Nodes of a tree whose keys or values fit into a buffer.
#define NEAR (BUFFERS == 2 ? SPLIT : 0)

// Whether the blocks of a token are clusters of SPAN.
#if __CUDA_ARCH__ >= 900
#define CLUSTERED (SINGLE && !WHOLE && HALVES == 1 && GROUP <= 4 && DIM <= 128 && STAGES == 1)
#else
#define CLUSTERED 0
#endif

// Blocks that a multiprocessor shall have at a time.
#define RESIDENT (SINGLE && STAGES == 1 && DIM <= 128 ? 3 : 2)

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

// A split's sums.
struct Kept {
  __align__(16) float o[GROUP][DIM];
  float sums[GROUP][2];
};

struct Shared {
  __align__(16) unsigned char buffers[BUFFERS * STAGES][SPLIT * STRIDE];
  // Whoever looks for pieces of a path has done with the scores.
  union {
    float scores[TILES][8 * HALVES][SCORES];
    uint4 pieces[WARPS][32];
  };
#if FUSED
  __align__(16) unsigned char queries[16 * STRIDE];
#if SINGLE
  __align__(16) u16 newest[2][DIM];
#else
  int positions[16];
#endif
#endif
#if CLUSTERED
  Kept kept[SPAN - 1];
  u64 arrived;
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
  __device__ void load(int buffer, const u16* cache, int split, int from, int to, int end) const {
    int first = split * SPLIT, newest = SINGLE && start < common ? start : -1;
    u32 base = shared_address(shared.buffers[buffer]);
    const u16* source = cache + (i64)first * DIM;
    bool whole = from <= first && first + SPLIT <= to;
    if (SINGLE && newest >= first && newest < first + SPLIT) whole = false;
    if (THREADS % PIECES == 0 && whole) {
      const int rows = THREADS / PIECES;
      base += threadIdx.x / PIECES * STRIDE + threadIdx.x % PIECES * 16;
      source += threadIdx.x * 8;
#pragma unroll
      for (int i = 0; i < SPLIT / rows; ++i) copy_all(base + i * rows * STRIDE, source + i * rows * DIM);
      return;
    }
#pragma unroll 2
    for (int i = threadIdx.x; i < SPLIT * PIECES; i += THREADS) {
      int place = i / PIECES, position = first + place;
      bool there = position >= from && position < to;
      // The newest is not in the cache yet.
      bool wanted = (there || position >= end) && position != newest;
      copy_where(base + place * STRIDE + i % PIECES * 16, there ? source + i * 8 : cache, there,
                 wanted);
    }
#if SINGLE
    int place = newest - first;
    if (to > start && place >= 0 && place < SPLIT && threadIdx.x < PIECES)
      ((uint4*)(shared.buffers[buffer] + place * STRIDE))[threadIdx.x] =
          ((const uint4*)shared.newest[cache == values])[threadIdx.x];
#endif
  }

  // Ask for the keys or values of a split.
  __device__ void load(bool value, int split, int stage) const {
    if (split < 0) return;
    int buffer = stage * BUFFERS + (value ? VALUES : 0);
    load(buffer, value ? values : keys, split, 0, common, common);
  }
};
