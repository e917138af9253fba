// The splits from the row's start on of a warp's token, whose positions it selects from all nodes.
// Include behind what nodes.cu defines of a block.

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
