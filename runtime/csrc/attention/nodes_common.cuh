// The splits of a step of nodes that end before the row's start. Include behind what
// nodes.cu defines of a block.

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
