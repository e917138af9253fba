#include "numbers.cuh"
#include "ring.cuh"
#include "weights.cuh"
#include "norm.cuh"
#include "outputs.cuh"

// Up to COLUMNS tokens by many more rows: the tokens, elements, lie in shared memory of each block
// once, and each warp takes TILES tiles of rows in turn, one segment of the inputs after the other,
// with a ring of DEPTH stages of its own. Warps do not meet behind the first barrier.

#define THREADS (WARPS * 32)
#define WIDTHS (COLUMNS / 8)
#define STAGE_BYTES (2 * TILES * WEIGHT_BYTES)

struct Shared {
  char tokens[BLOCKS][WIDTHS][EIGHT_BYTES];
  char ring[WARPS][DEPTH * STAGE_BYTES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "what the launch asks for");

struct Ring {
  const Arguments& a;
  u32 start;
  int lane, group, block, slot;

  // Ask for the next stage; behind the last one there is nothing to ask for.
  __device__ __forceinline__ void ask() {
    if (group < a.groups) {
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i)
        copy_weights<true>(start + slot * STAGE_BYTES + i * WEIGHT_BYTES,
                           eight_of(a, group * 2 * TILES + i), block, lane);
      if (++slot == DEPTH) slot = 0;
      if (++block == BLOCKS) block = 0, group += gridDim.x * WARPS;
    }
    end_copies();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    product(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *(Shared*)memory;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // The last groups go to different blocks.
  int first_group = warp * gridDim.x + blockIdx.x;
  Ring ring = {a, shared_address(shared.ring[warp]), lane, first_group, 0, 0};
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) ring.ask();
  wait_for_predecessors();
  for (int i = warp; i < BLOCKS * WIDTHS; i += WARPS) {
    int block = i / WIDTHS, width = i % WIDTHS;
    Eight eight = {(const char*)a.inputs, max(0, min(8, a.tokens - width * 8))};
    if (eight.rows) eight.first += (long long)width * 8 * INPUTS * 2;
    copy_eight<INPUTS>(shared_address(shared.tokens[block][width]), eight, block, lane);
  }
  ring.ask();
  wait_copies<0>();
  __syncthreads();

  int slot = 0;
  for (int group = first_group; group < a.groups; group += gridDim.x * WARPS) {
    float total[TILES][WIDTHS][4] = {};
    int block = 0;
#pragma unroll 1
    for (int segment = 0; segment < SEGMENTS; ++segment) {
      float sums[TILES][WIDTHS][4] = {};
#pragma unroll 1
      for (; block < first_block(segment + 1); ++block) {
        wait_copies<DEPTH - 1>();
        __syncwarp();
        const char* stage = shared.ring[warp] + slot * STAGE_BYTES;
        uint4 low[TILES][2], high[TILES][2];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          read_weights(stage + 2 * t * WEIGHT_BYTES, block, lane, low[t]);
          read_weights(stage + (2 * t + 1) * WEIGHT_BYTES, block, lane, high[t]);
        }
        if (++slot == DEPTH) slot = 0;
        __syncwarp();
        ring.ask();
#pragma unroll
        for (int n = 0; n < WIDTHS; ++n) {
          uint4 x[2];
          read_eight(shared.tokens[block][n], lane, x);
#pragma unroll
          for (int t = 0; t < TILES; ++t) multiply_weights(sums[t][n], low[t], high[t], x);
        }
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int n = 0; n < WIDTHS; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            total[t][n][i] = segment ? __fadd_rn(total[t][n][i], sums[t][n][i]) : sums[t][n][i];
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int n = 0; n < WIDTHS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int row = (group * TILES + t) * 16 + i / 2 * 8 + lane / 4;
          finish_one(a, row, n * 8 + lane % 4 * 2 + i % 2, total[t][n][i], 0, 0);
        }
  }
}
