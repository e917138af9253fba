#include "numbers.cuh"
#include "ring.cuh"
#include "weights.cuh"
#include "norm.cuh"
#include "outputs.cuh"

// More tokens than a narrow product takes: a block has EIGHTS times eight rows of weights and
// WIDTHS times eight tokens, through DEPTH stages of 64 inputs of both, that all its warps fill and
// read. A warp has TILES tiles of sixteen rows by SHARE widths; it computes one segment of the
// inputs after the other, each from zero.

#define THREADS 256
#define ROW_WARPS (EIGHTS / 2 / TILES)
#define TOKEN_WARPS (WIDTHS / SHARE)
#define STAGE_BYTES (EIGHTS * WEIGHT_BYTES + WIDTHS * EIGHT_BYTES)
static_assert(ROW_WARPS * TOKEN_WARPS * 32 == THREADS, "eight warps share a block's sums");

static_assert(DEPTH * STAGE_BYTES == SHARED_BYTES, "what the launch asks for");

struct Loader {
  const Arguments& a;
  u32 start;
  int warp, lane;

  __device__ __forceinline__ void weights(int block) {
    if (block >= BLOCKS) return;
#pragma unroll
    for (int i = 0; i < (EIGHTS + 7) / 8; ++i) {
      int eight = i * 8 + warp;
      if (EIGHTS % 8 && eight >= EIGHTS) break;
      copy_weights<false>(stage(block) + eight * WEIGHT_BYTES, eight_of(a, blockIdx.x * EIGHTS + eight),
                   block, lane);
    }
  }

  __device__ __forceinline__ void activations(int block) {
    if (block >= BLOCKS) return;
#pragma unroll
    for (int i = 0; i < (WIDTHS + 7) / 8; ++i) {
      int width = i * 8 + warp;
      if (WIDTHS % 8 && width >= WIDTHS) break;
      int token = (blockIdx.y * WIDTHS + width) * 8;
      Eight eight = {(const char*)a.inputs, max(0, min(8, a.tokens - token))};
      if (eight.rows) eight.first += (long long)token * INPUTS * 2;
      copy_eight<INPUTS>(stage(block) + EIGHTS * WEIGHT_BYTES + width * EIGHT_BYTES, eight, block,
                         lane);
    }
  }

  __device__ __forceinline__ u32 stage(int block) { return start + block % DEPTH * STAGE_BYTES; }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    product(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) char memory[];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int tile = warp % ROW_WARPS * TILES, width = warp / ROW_WARPS * SHARE;
  Loader load = {a, shared_address(memory), warp, lane};
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) load.weights(i);
  wait_for_predecessors();
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) {
    load.activations(i);
    end_copies();
  }

  float total[TILES][SHARE][4] = {};
  int block = 0;
#pragma unroll 1
  for (int segment = 0; segment < SEGMENTS; ++segment) {
    float sums[TILES][SHARE][4] = {};
#pragma unroll 1
    for (; block < first_block(segment + 1); ++block) {
      wait_copies<DEPTH - 2>();
      __syncthreads();
      load.weights(block + DEPTH - 1);
      load.activations(block + DEPTH - 1);
      end_copies();
      const char* stage = memory + block % DEPTH * STAGE_BYTES;
      uint4 low[TILES][2], high[TILES][2];
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const char* eights = stage + (tile + t) * 2 * WEIGHT_BYTES;
        read_weights(eights, block, lane, low[t]);
        read_weights(eights + WEIGHT_BYTES, block, lane, high[t]);
      }
#pragma unroll
      for (int n = 0; n < SHARE; ++n) {
        uint4 x[2];
        read_eight(stage + EIGHTS * WEIGHT_BYTES + (width + n) * EIGHT_BYTES, lane, x);
#pragma unroll
        for (int t = 0; t < TILES; ++t) multiply_weights(sums[t][n], low[t], high[t], x);
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int n = 0; n < SHARE; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          total[t][n][i] = segment ? __fadd_rn(total[t][n][i], sums[t][n][i]) : sums[t][n][i];
  }

#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int n = 0; n < SHARE; ++n) {
      int eight = blockIdx.x * EIGHTS + (tile + t) * 2;
      int token = (blockIdx.y * WIDTHS + width + n) * 8 + lane % 4 * 2;
      int row = (OUTPUT == GATED ? eight / 2 : eight) * 8 + lane / 4;
      const float(&sum)[4] = total[t][n];
      float4 added = added_to(a, rank_of(a), row, token);
#if OUTPUT == GATED
      finish_gated(a, row, token, sum[0], sum[2], added.x, added.z);
      finish_gated(a, row, token + 1, sum[1], sum[3], added.y, added.w);
#else
      float more[4] = {added.x, added.y, added.z, added.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int r = row + i / 2 * 8, c = token + i % 2;
        finish_one(a, r, c, sum[i], OUTPUT == RESIDUAL ? residual_of(a, r, c) : 0, more[i]);
      }
#endif
    }
}
