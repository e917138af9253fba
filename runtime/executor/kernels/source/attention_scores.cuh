// A warp's queries, and the scores of a split. It comes behind attention_block.cuh.

// The queries of a warp's tile as the left operand.
struct Queries {
  u32 held[HELD ? STEPS : 1][4];
  const u32* from[2];
  u32 rows;

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
    for (int i = 0; HELD && i < STEPS; ++i) fetch(held[HELD ? i : 0], i);
  }

  // From 16 rows in shared memory.
  __device__ void load(const unsigned char* queries) {
    int lane = threadIdx.x % 32;
    rows = shared_address(queries) + lane % 16 * STRIDE + lane / 16 * 16;
#pragma unroll
    for (int i = 0; HELD && i < STEPS; ++i) fetch(held[HELD ? i : 0], i);
  }

  __device__ void fetch(u32 (&a)[4], int i) const {
#if FUSED
    load_tiles(a, rows + i * 32);
    if (HALVES == 1) a[1] = a[3] = 0;
#else
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int k = 0; k < 2; ++k)
        a[2 * k + half] = from[half] ? __ldcg(from[half] + i * 8 + k * 4) : 0;
#endif
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

// Scores of a warp's part of a split whose keys are in this buffer.
__device__ void score(const Block& block, const Place& at, const Queries& queries, int buffer,
                      float (&s)[SCORED][4]) {
  u32 base = shared_address(block.shared.buffers[buffer]) +
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

// Put a warp's scores where all of its tile find them.
__device__ void publish(const Block& block, const Place& at, const float (&own)[SCORED][4]) {
  int g = at.lane / 4, column = at.lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < SCORED; ++j)
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
      *(float2*)&block.shared.scores[at.tile][g + 8 * half][(at.share * SCORED + j) * 8 + column] =
          make_float2(own[j][2 * half], own[j][2 * half + 1]);
  __syncthreads();
}

// Let all warps of a tile have all scores of a split. Nobody reads its keys any more afterwards.
__device__ void exchange(const Block& block, const Place& at, const float (&own)[SCORED][4],
                         float (&s)[8][4]) {
  publish(block, at, own);
  int g = at.lane / 4, column = at.lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float2 pair = *(const float2*)&block.shared.scores[at.tile][g + 8 * half][j * 8 + column];
      s[j][2 * half] = pair.x;
      s[j][2 * half + 1] = pair.y;
    }
}
