#include "numbers.cuh"
#include "ring.cuh"
#include "weights.cuh"
#include "norm.cuh"
#include "outputs.cuh"

// Up to COLUMNS tokens by clusters of eight blocks, from compute capability 9.0 on. Block r of a
// cluster has segment r of the inputs: of the tokens it reads that segment alone, once, and keeps it
// in shared memory. A warp has TILES tiles of a step's rows, for one of TOKEN_WARPS shares of the
// tokens, with a ring of its own; each block then adds the segments of an eighth of the sums.

#define THREADS 256
#define CLUSTER 8
#define WIDTHS (COLUMNS / 8)
#define SHARE (WIDTHS / TOKEN_WARPS)
#define ROW_WARPS (8 / TOKEN_WARPS)
#define STAGE_BYTES (2 * TILES * WEIGHT_BYTES)
#define RING_BYTES (DEPTH * STAGE_BYTES)
#define WARP_ITEMS (TILES * SHARE * 32)
#define BLOCK_ITEMS WARP_ITEMS  // an eighth of those of eight warps

struct Shared {
  char ring[8][RING_BYTES];
  char tokens[MOST][WIDTHS][EIGHT_BYTES];
#if REPEATED
  float4 parts[2][8][WARP_ITEMS];
#endif
  float squares[COLUMNS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "what the launch asks for");
static_assert(REPEATED || WARP_ITEMS * 16 <= RING_BYTES, "parts lie where the ring was");

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of the same shared memory in another block of the cluster.
__device__ __forceinline__ u32 in_block(const void* p, int block) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(block));
  return address;
}

__device__ __forceinline__ float read_number(u32 address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ float4 read_part(u32 address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

struct Ring {
  const Arguments& a;
  u32 start;
  int first, count, lane, tile, clusters;
  int group, block, slot;

  // Ask for the next stage; behind the last one there is nothing to ask for.
  __device__ __forceinline__ void ask() {
    if (group < a.groups && count > 0) {
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i)
        copy_weights<true>(start + slot * STAGE_BYTES + i * WEIGHT_BYTES,
                           eight_of(a, (group * ROW_WARPS * TILES + tile) * 2 + i), first + block,
                           lane);
      if (++slot == DEPTH) slot = 0;
      if (++block == count) block = 0, group += clusters;
    }
    end_copies();
  }
};

#if NORMED
// The norm of the tokens, a warp eight of them at a time, of which each block has its segment.
__device__ __forceinline__ void norm_tokens(const Arguments& a, Shared& shared, int first,
                                            int count) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4;
  int token = warp * 8 + lane / 4;
  bool there = warp < WIDTHS && token < a.tokens;
  const float* row = (const float*)a.inputs;
  if (there) row += row_of(a, token) * INPUTS;
  Held held;
  float sum = add_lanes(read_segment(held, row, there, first, count, q));
  if (q == 0 && warp < WIDTHS) shared.squares[token] = sum;
  meet_cluster();
  if (warp >= WIDTHS) return;
  float parts[CLUSTER];
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) parts[r] = read_number(in_block(&shared.squares[token], r));
  float squares = parts[0];
#pragma unroll
  for (int r = 1; r < CLUSTER; ++r) squares = __fadd_rn(squares, parts[r]);
  float scale = norm_scale(squares, a.eps);
#pragma unroll
  for (int j = 0; j < MOST; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int input = first_input(first + j, i, q);
      uint4 gains = make_uint4(0, 0, 0, 0);
      if (j < count && (INPUTS % 64 == 0 || input < INPUTS))
        gains = *(const uint4*)(a.gain + input);
      *(uint4*)(shared.tokens[j][warp] + place_of_half(lane, i)) =
          normed_eight(held[j][i], scale, gains);
    }
}
#endif

__device__ __forceinline__ void copy_tokens(const Arguments& a, Shared& shared, int first,
                                            int count) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = warp; i < count * WIDTHS; i += 8) {
    int block = i / WIDTHS, width = i % WIDTHS;
    Eight eight = {(const char*)a.inputs, max(0, min(8, a.tokens - width * 8))};
    if (eight.rows) eight.first += (long long)width * 8 * INPUTS * 2;
    copy_eight<INPUTS>(shared_address(shared.tokens[block][width]), eight, first + block, lane);
  }
  end_copies();
  wait_copies<0>();
}

// An item of block `rank`: rows g and g + 8 of a tile, tokens 2q and 2q + 1 of a width, of which a
// warp has the sums.
struct Item {
  int warp, place, row, token;

  __device__ __forceinline__ Item(int rank, int group, int index) {
    warp = rank, place = index;
    int lane = index % 32, fragment = index / 32;
    int tile = warp % ROW_WARPS * TILES + fragment / SHARE;
    int eight = (group * ROW_WARPS * TILES + tile) * 2;
    row = (OUTPUT == GATED ? eight / 2 : eight) * 8 + lane / 4;
    token = (warp / ROW_WARPS * SHARE + fragment % SHARE) * 8 + lane % 4 * 2;
  }
};

__device__ __forceinline__ void finish(const Arguments& a, const Item& item, float4 sum,
                                       float4 added) {
  int row = item.row, token = item.token;
#if OUTPUT == GATED
  finish_gated(a, row, token, sum.x, sum.z, added.x, added.z);
  finish_gated(a, row, token + 1, sum.y, sum.w, added.y, added.w);
#else
  float sums[4] = {sum.x, sum.y, sum.z, sum.w}, more[4] = {added.x, added.y, added.z, added.w};
  float before[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (OUTPUT == RESIDUAL) before[i] = residual_of(a, row + i / 2 * 8, token + i % 2);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    finish_one(a, row + i / 2 * 8, token + i % 2, sums[i], before[i], more[i]);
#endif
}

// The sums of the segments in ascending order, one from each block of the cluster.
__device__ __forceinline__ float4 add_blocks(const float4* part) {
  float4 parts[CLUSTER];
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) parts[r] = read_part(in_block(part, r));
  float4 sum = parts[0];
#pragma unroll
  for (int r = 1; r < CLUSTER; ++r) {
    sum.x = __fadd_rn(sum.x, parts[r].x);
    sum.y = __fadd_rn(sum.y, parts[r].y);
    sum.z = __fadd_rn(sum.z, parts[r].z);
    sum.w = __fadd_rn(sum.w, parts[r].w);
  }
  return sum;
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, RESIDENT)
    product(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *(Shared*)memory;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER;
  int first = first_block(rank), count = first_block(rank + 1) - first;
  int clusters = gridDim.x / CLUSTER, width = warp / ROW_WARPS * SHARE;
  Ring ring = {a,        shared_address(shared.ring[warp]), first,   count, lane,
               warp % ROW_WARPS * TILES, clusters,          cluster, 0,     0};
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) ring.ask();
  int lora_rank = rank_of(a);
  wait_for_predecessors();
#if NORMED
  norm_tokens(a, shared, first, count);
#else
  copy_tokens(a, shared, first, count);
#endif
  __syncthreads();

  int slot = 0, parity = 0;
  for (int group = cluster; group < a.groups; group += clusters) {
    float sums[TILES][SHARE][4] = {};
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      wait_copies<DEPTH - 1>();
      __syncwarp();
      const char* stage = shared.ring[warp] + slot * STAGE_BYTES;
      uint4 low[TILES][2], high[TILES][2];
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const char* eights = stage + 2 * t * WEIGHT_BYTES;
        read_weights(eights, first + j, lane, low[t]);
        read_weights(eights + WEIGHT_BYTES, first + j, lane, high[t]);
      }
      if (++slot == DEPTH) slot = 0;
      __syncwarp();
      ring.ask();
#pragma unroll
      for (int n = 0; n < SHARE; ++n) {
        uint4 x[2];
        read_eight(shared.tokens[j][width + n], lane, x);
#pragma unroll
        for (int t = 0; t < TILES; ++t) multiply_weights(sums[t][n], low[t], high[t], x);
      }
    }
#if REPEATED
    float4* parts = shared.parts[parity][0];
    const int between = WARP_ITEMS;
#else
    // Nothing is on its way any more, and a warp writes where it alone has read.
    float4* parts = (float4*)shared.ring[0];
    const int between = RING_BYTES / 16;
    __syncwarp();
#endif
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int n = 0; n < SHARE; ++n)
        parts[warp * between + (t * SHARE + n) * 32 + lane] =
            make_float4(sums[t][n][0], sums[t][n][1], sums[t][n][2], sums[t][n][3]);
    meet_cluster();
#pragma unroll
    for (int i = 0; i < (BLOCK_ITEMS + THREADS - 1) / THREADS; ++i) {
      int index = i * THREADS + threadIdx.x;
      if (BLOCK_ITEMS % THREADS && index >= BLOCK_ITEMS) break;
      Item item(rank, group, index);
      finish(a, item, add_blocks(&parts[item.warp * between + item.place]),
             added_to(a, lora_rank, item.row, item.token));
    }
    parity ^= 1;
  }
  meet_cluster();
}
