// A warp's queries, and the scores of a split. Include behind block.cuh.

// The queries of a warp's tile as the left operand, from shared memory: lane i says where row i % 16 is.
struct Queries {
  u32 held[HELD ? STEPS : 1][4];
  u32 rows;

  __device__ void load(const unsigned char* queries, int row) {
    rows = shared_address(queries) + row * STRIDE + threadIdx.x % 32 / 16 * 16;
#pragma unroll
    for (int i = 0; HELD && i < STEPS; ++i) fetch(held[HELD ? i : 0], i);
  }

  __device__ void fetch(u32 (&a)[4], int i) const {
    load_tiles(a, rows + i * 32);
    if (HALVES == 1) a[1] = a[3] = 0;
  }

  // Fragments of a step of 16 columns.
  __device__ void step(u32 (&a)[4], int i) const {
    if (!HELD) return fetch(a, i);
#pragma unroll
    for (int k = 0; k < 4; ++k) a[k] = held[HELD ? i : 0][k];
  }
};

// A warp's place: a tile of 8 or 16 rows that it shares with SHARE - 1 others.
struct Place {
  int lane, tile, share;
  int first_row;  // counted from the block's first
  int token[2];   // of rows g and g + 8, counted from the tile's first; -1 where there is none

  __device__ Place(const Block& block) {
    lane = threadIdx.x % 32;
    tile = threadIdx.x / 32 / SHARE;
    share = threadIdx.x / 32 % SHARE;
    first_row = tile * 8 * HALVES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int own = first_row + lane / 4 + 8 * half, row = block.tile * block.rows() + own;
      bool there = half < HALVES && row < block.a.seq_len * GROUP && own < block.rows();
      token[half] = there ? row / GROUP - block.first_token : -1;
    }
  }

  // Number of positions of a piece's split that rows g or g + 8 see; 0 if it is not theirs.
  __device__ int seen(const Block& block, const Piece& piece, int half) const {
    return has(piece, half) ? block.seen(token[half]) - piece.split * SPLIT : 0;
  }

  // True if a piece is one of row g's or row g + 8's.
  __device__ bool has(const Piece& piece, int half) const {
    return token[half] >= 0 && (!ALONE || piece.token < 0 || piece.token == token[half]);
  }
};

constexpr int SCORED = 8 / SHARE;

// Scores of a warp's part of a split, whose keys are in shared memory.
__device__ void score(const Block& block, const Place& at, const Queries& queries,
                      float (&s)[SCORED][4]) {
  u32 base = shared_address(block.shared.buffers[0]) + (at.share * SCORED * 8 + at.lane % 8) * STRIDE;
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

// Put a warp's scores where all of its tile find them.
__device__ void publish(const Block& block, const Place& at, const float (&own)[SCORED][4]) {
  put_scores(block.shared.reused.of.scores[at.tile], at.lane, at.share, own);
  __syncthreads();
}

// Give all warps of a tile all scores of a split. Its keys are not read any more afterwards.
__device__ void exchange(const Block& block, const Place& at, const float (&own)[SCORED][4],
                         float (&s)[8][4]) {
  publish(block, at, own);
  take_scores(block.shared.reused.of.scores[at.tile], at.lane, s);
}
