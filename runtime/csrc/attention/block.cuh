// Configuration, work items and shared memory of a block of attention.

constexpr int WARPS = 4;
constexpr int SHARE = Config::SHARE;
constexpr int HALVES = Config::HALVES;
constexpr int THREADS = WARPS * 32;
constexpr int SPLIT = 64;
constexpr int SPAN = 4;
constexpr int TILES = WARPS / SHARE;
constexpr int ROWS = TILES * 8 * HALVES;
// Tokens that have rows in a block's tiles, at most.
constexpr int TOKENS = ROWS % GROUP ? (ROWS + GROUP - 2) / GROUP + 1 : ROWS / GROUP;
// True if a warp keeps its queries in registers.
constexpr bool HELD = Config::SINGLE || DIM <= 128;
// A row in shared memory: eight of them meet no bank twice.
constexpr int STRIDE = DIM * 2 + 16;
constexpr int STEPS = DIM / 16;
constexpr int PIECES = DIM / 8;
// Pairs of eight columns of the values that a warp has.
constexpr int OWN = (STEPS + SHARE - 1) / SHARE;
// Keys and values of a split have one buffer in turns where two are too large.
constexpr int BUFFERS = DIM <= 128 ? 2 : 1;
constexpr int VALUES = BUFFERS - 1;
constexpr int SCORES = 72;
// Tokens of a step that is FUSED, at most.
constexpr int FEW = 16;
// Heads that a warp rotates at a time.
constexpr int BATCH =
    Config::LONE ? 5 : !Config::SINGLE ? (DIM > 128 ? 2 : 4) : GROUP <= 2 ? 1 : GROUP <= 6 ? 2 : 4;

// Work on a tree's positions from the row's start on: each token in an item of its own, or a
// warp each, if there are at most NODES, or all of a block together.
constexpr bool ALONE = Config::TREE && Config::FUSED;
constexpr bool PAIRED = Config::TREE && !Config::FUSED && Config::BY_WARP;
constexpr bool WOVEN = Config::TREE && !Config::FUSED && !Config::BY_WARP;
constexpr int NODES = SPLIT;
// Nodes of a tree that is WOVEN whose keys or values fit into a buffer.
constexpr int NEAR = BUFFERS == 2 ? SPLIT : 0;

// Blocks that a multiprocessor shall have at a time.
constexpr int RESIDENT = SHARE == 4 && DIM <= 128 ? 3 : 2;

// A split's sums.
struct Kept {
  __align__(16) float o[GROUP][DIM];
  float sums[GROUP][2];
};

// Whoever looks for pieces of a path has done with the scores.
union Scores {
  float scores[TILES][8 * HALVES][SCORES];
  uint4 pieces[WARPS][32];
};

// Queries take the place of the scores where warps hold them.
template <bool THERE>
struct Reused {
  union {
    Scores of;
    __align__(16) unsigned char queries[TILES * 16 * STRIDE];
  };
};
template <>
struct Reused<false> {
  Scores of;
  __align__(16) unsigned char queries[TILES * 16 * STRIDE];
};

// Optional members of shared memory; an absent one takes no bytes.
template <bool THERE>
struct Newest {  // FUSED, of a row with one token
  __align__(16) u16 newest[2][DIM];
};
template <>
struct Newest<false> {
  static constexpr u16 (*newest)[DIM] = nullptr;
};

template <bool THERE>
struct Few {  // FUSED, of a row with some
  int positions[FEW];
  int fresh[FEW];   // tokens whose keys and values this block needs
  int places[FEW];  // where in the first split they are, if they are
};
template <>
struct Few<false> {
  static constexpr int *positions = nullptr, *fresh = nullptr, *places = nullptr;
};

template <bool THERE>
struct Together {  // CLUSTERED
  Kept kept[SPAN - 1];
  u64 arrived;
};
template <>
struct Together<false> {
  static constexpr Kept* kept = nullptr;
  static constexpr u64 arrived = 0;
};

template <bool THERE>
struct Near {  // PAIRED
  unsigned char near[WARPS][SPLIT];  // where a warp's token has the positions of a split
};
template <>
struct Near<false> {
  static constexpr unsigned char (*near)[SPLIT] = nullptr;
};

template <bool THERE>
struct Places {  // WOVEN
  unsigned short woven[TOKENS][SPLIT];  // where each token has them, in the tree
};
template <>
struct Places<false> {
  static constexpr unsigned short (*woven)[SPLIT] = nullptr;
};

template <bool THERE>
struct Paths {  // ALONE
  unsigned short paths[2][SPLIT];  // which node of the tree is at each position of a split
  u32 masks[FEW];
};
template <>
struct Paths<false> {
  static constexpr unsigned short (*paths)[SPLIT] = nullptr;
  static constexpr u32* masks = nullptr;
};

template <bool THERE>
struct Seen {  // TREE
  int seen[TOKENS];  // positions that a token sees
};
template <>
struct Seen<false> {
  static constexpr int* seen = nullptr;
};

struct Shared {
  __align__(16) unsigned char buffers[BUFFERS][SPLIT * STRIDE];
  Reused<HELD> reused;
  Newest<Config::FUSED && Config::SINGLE> single;
  Few<Config::FUSED && !Config::SINGLE> few;
  Together<Config::CLUSTERED> cluster;
  Near<PAIRED> paired;
  Places<WOVEN> tree;
  Paths<ALONE> alone;
  Seen<Config::TREE> tokens;
};

// A split of an item, which is what a block does at a time: of all tokens, or of one.
struct Piece {
  int item, split, end;  // the item ends before this split
  int unit;              // where its sums are left
  int token;             // counted from the tile's first; -1 for all
  int seen;              // positions of it
  int path;              // which of the paths in shared memory
};

// Work of the blocks of a tile, the same for all of their threads.
//
// Positions are cut into units: splits, or spans where there are many. Splits that reach behind the
// row's start are APART in a tree: each token has an item of its own there, as its positions have
// slots of their own. All other units are one item each.
struct Block {
  const Arguments& a;
  Shared& shared;
  int row, kv_head, tile, first_token, tokens;
  int tiles;   // of a KV head of a row
  int start;   // slots that were filled before this step
  int common;  // positions whose slot is the same number for all tokens of the block
  int splits, apart, units, items;
  int spans, cut;  // units that are spans; the first split behind them
  int groups;      // of tokens that have a warp each from `apart` on: the last blocks have them
  int item, step;  // the block's first item; blocks that have the items
  bool lone;       // it has the rows of one token
  bool causal;
  u16* keys;
  u16* values;

  __device__ Block(const Arguments& a, Shared& shared) : a(a), shared(shared) {
    kv_head = blockIdx.y;
    row = blockIdx.z % a.batch;
    u32 mask_of_node = 0;
    if constexpr (ALONE) {
      int node = min((int)threadIdx.x, a.seq_len - 1);
      mask_of_node = a.mask[row * a.seq_len + node];
    }
    start = first_slot(a, row);
    item = blockIdx.x;
    step = gridDim.x;
    if constexpr (Config::LONE || Config::SINGLE) {
      // Clusters that have nothing to do in short steps come last.
      int behind = blockIdx.z / (a.batch * a.seq_len);
      tile = a.seq_len - 1 - blockIdx.z / a.batch % a.seq_len;
      item += behind * gridDim.x;
      step *= gridDim.z / (a.batch * a.seq_len);
    } else {
      // Tokens that see most come first.
      tile = (gridDim.z - 1 - blockIdx.z) / a.batch;
    }
    tiles = (a.seq_len * GROUP + ROWS - 1) / ROWS;
    lone = Config::LONE && start + a.seq_len <= SPAN * SPLIT;
    if (Config::LONE && !lone) {
      // The blocks of several tokens are those of a tile.
      int place = tile / tiles;
      tile -= place * tiles;
      item += place * step;
      step *= (a.seq_len - tile + tiles - 1) / tiles;
    }
    first_token = tile * rows() / GROUP;
    tokens = min(a.seq_len, (tile * rows() + rows() - 1) / GROUP + 1) - first_token;
    i64 cache = ((i64)row * KV_HEADS + kv_head) * a.kv_len * DIM;
    keys = a.keys + cache;
    values = a.values + cache;
    int most = min(a.kv_len, start + first_token + tokens);
    common = most;
    causal = true;
    if constexpr (ALONE) {
      if (threadIdx.x < FEW) shared.alone.masks[threadIdx.x] = mask_of_node;
      __syncthreads();
    }
    if constexpr (Config::TREE) {
      int own = threadIdx.x, count = 0;
      if (own < tokens) {
        const u32* mask = mask_of(own);
        for (int i = 0; i < words(); ++i) count += __popc(mask[i]);
        shared.tokens.seen[own] = min(a.kv_len, start + count);
      }
      causal = __syncthreads_and(own >= tokens || count == first_token + own + 1);
      if (!causal) {
        common = start;
        // Each token has an item, which writes its key and value.
        most = min(a.kv_len, start + 1);
        for (int i = 0; i < tokens; ++i) most = max(most, shared.tokens.seen[i]);
      }
    }
    splits = max(1, (most + SPLIT - 1) / SPLIT);
    apart = causal || WOVEN ? splits : min(splits, start / SPLIT);
    groups = PAIRED && !causal ? (tokens + WARPS - 1) / WARPS : 0;
    spans = Config::WHOLE || splits <= a.fine ? 0 : apart / SPAN;
    cut = spans * SPAN;
    units = spans + splits - cut;
    step -= groups;
    items = common_items() + (ALONE ? (splits - apart) * tokens : 0);
  }

  // Tiles of the rows and KV heads before this one.
  __device__ int tiles_before() const { return (row * KV_HEADS + kv_head) * tiles; }
  __device__ int rows() const { return Config::LONE && lone ? GROUP : ROWS; }
  __device__ int common_items() const { return spans + apart - cut; }
  __device__ int words() const { return (a.seq_len + 31) / 32; }
  __device__ const u32* mask_of(int token) const {
    if constexpr (ALONE) return shared.alone.masks + first_token + token;
    return a.mask + ((i64)row * a.seq_len + first_token + token) * words();
  }

  // Positions that a token of the block sees.
  __device__ int seen(int token) const {
    if constexpr (Config::TREE) return token < tokens ? shared.tokens.seen[token] : 0;
    return token < tokens ? min(a.kv_len, start + first_token + token + 1) : 0;
  }

  // The first row of a token, counted from the tile's first, which may be among its rows.
  __device__ int row_of(int token) const {
    int first = (first_token + token) * GROUP - tile * rows();
    return max(0, min(first, min(rows(), a.seq_len * GROUP - tile * rows())));
  }

  // The first piece of an item.
  __device__ Piece first_of(int item, int path) const {
    Piece piece = {item, item * SPAN, item * SPAN + SPAN, item, -1, common, path};
    if (item < spans) return piece;
    int split = cut + item - spans;
    if (ALONE && split >= apart) {
      piece.token = (split - apart) % tokens;
      split = apart + (split - apart) / tokens;
      piece.seen = seen(piece.token);
    }
    piece.split = split;
    piece.end = split + 1;
    piece.unit = unit_of(split);
    return piece;
  }

  __device__ int unit_of(int split) const { return spans + split - cut; }

  // Work of this block behind a piece.
  __device__ Piece behind(Piece piece) const {
    if (++piece.split < piece.end) return piece;
    return first_of(piece.item + step, 1 - piece.path);
  }

  // Find which nodes of the tree are where a piece's token sees them; a barrier must follow.
  __device__ void find(const Piece& piece) const {
    if constexpr (!ALONE) return;
    if (piece.item >= items || piece.token < 0) return;
    const u32* mask = mask_of(piece.token);
    for (int node = threadIdx.x; node < a.seq_len; node += THREADS) {
      u32 word = mask[node / 32], bit = 1u << node % 32;
      int place = start - piece.split * SPLIT + __popc(word & (bit - 1));
      for (int i = 0; i < node / 32; ++i) place += __popc(mask[i]);
      if ((word & bit) && place >= 0 && place < SPLIT)
        shared.alone.paths[piece.path][place] = min(node, a.kv_len - 1 - start);
    }
  }

  // Ask for the queries of the tile, which are rotated; zeros where there are none.
  __device__ void load_queries() const {
    int rows = min(ROWS, a.seq_len * GROUP - tile * ROWS);
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
      int own = tile * ROWS + i / PIECES, head = kv_head * GROUP + own % GROUP;
      const u16* from = a.queries + (((i64)row * a.seq_len + own / GROUP) * QUERY_HEADS + head) * DIM;
      bool there = i / PIECES < rows;
      copy_ahead(shared_address(shared.reused.queries) + i / PIECES * STRIDE + i % PIECES * 16,
                 there ? from + i % PIECES * 8 : a.queries, there);
    }
  }

  // Ask for the keys or values of a piece at positions [from, to); those behind all that it sees
  // become zeros.
  __device__ void load(bool value, const Piece& piece, int from, int to) const {
    if (piece.item >= items) return;
    const int rows = THREADS / PIECES;  // at a time
    const u16* cache = value ? values : keys;
    int first = piece.split * SPLIT, newest = Config::SINGLE && start < common ? start : -1;
    int own = threadIdx.x / PIECES, column = threadIdx.x % PIECES * 8;
    u32 base = shared_address(shared.buffers[value ? VALUES : 0]) + own * STRIDE + column * 2;
    const u16* source = cache + (i64)(first + own) * DIM + column;
    bool whole = from <= first && first + SPLIT <= to && (newest < first || newest >= first + SPLIT);
    if (ALONE && piece.token >= 0) whole = false;
    if (THREADS % PIECES == 0 && whole) {
#pragma unroll
      for (int i = 0; i < SPLIT; i += rows) copy_all(base + i * STRIDE, source + i * DIM);
      return;
    }
    if (own < rows)
#pragma unroll
      for (int i = 0; i < SPLIT; i += rows) {
        int position = first + own + i;
        if (SPLIT % rows && own + i >= SPLIT) break;
        bool there = position >= from && position < to;
        // The newest is not in the cache yet.
        bool wanted = (there || position >= piece.seen) && position != newest;
        const u16* slot = source + i * DIM;
        if constexpr (ALONE) {
          if (there && piece.token >= 0 && position >= start)
            slot = cache + (i64)(start + shared.alone.paths[piece.path][own + i]) * DIM + column;
        }
        copy_where(base + i * STRIDE, there ? slot : cache, there, wanted);
      }
    if constexpr (Config::SINGLE) {
      int place = newest - first;
      if (to > start && place >= 0 && place < SPLIT && threadIdx.x < PIECES)
        ((uint4*)(shared.buffers[value ? VALUES : 0] + place * STRIDE))[threadIdx.x] =
            ((const uint4*)shared.single.newest[value])[threadIdx.x];
    }
  }

  __device__ void load(bool value, const Piece& piece) const { load(value, piece, 0, piece.seen); }
};
