#include "common/numbers.cuh"
#include "common/ring.cuh"
#include "gemm/norm.cuh"

// x A by itself, for more tokens than the product with them takes (shrink.cuh), in the same order:
// sixteen ranks by eight tokens a block, whose warps have a segment of the inputs each. INPUTS is K;
// the tokens are elements.

constexpr int THREADS = 256;
// Blocks of inputs that are asked for at a time.
constexpr int AHEAD = MOST < 5 ? MOST : 4;

struct Shrink {
  const u16* x;     // [tokens, INPUTS]
  const u16* a;     // [width, INPUTS]
  const int* rank;  // of the active adapter
  float* out;       // [tokens, width]
  int tokens;
  int width;  // ranks of all matrices
  int most;   // and of one
};

// Inputs of a lane in a row of a block; zeros behind its end.
__device__ __forceinline__ void read_inputs(const u16* row, int block, int lane, bool there,
                                            uint4 (&halves)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int input = first_input(block, i, lane % 4);
    halves[i] = make_uint4(0, 0, 0, 0);
    bool inside = Config::INPUTS % 64 == 0 || input < Config::INPUTS;
    if (there && inside) halves[i] = *(const uint4*)(row + input);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) shrink(const __grid_constant__ Shrink step) {
  __shared__ float4 parts[SEGMENTS][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int first = first_block(warp), count = first_block(warp + 1) - first;
  int rank = blockIdx.x * 16 + lane / 4, token = blockIdx.y * 8 + lane / 4;
  bool active = blockIdx.x * 16 % step.most < *step.rank, there = token < step.tokens;
  const u16* a = step.a + (long long)rank * Config::INPUTS;
  const u16* x = step.x + (long long)(there ? token : 0) * Config::INPUTS;
  uint4 low[AHEAD][2], high[AHEAD][2];
  auto read_ranks = [&](int base) {
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      bool needed = active && base + j < count;
      read_inputs(a, first + base + j, lane, needed, low[j]);
      read_inputs(a + 8 * Config::INPUTS, first + base + j, lane, needed, high[j]);
    }
  };
  read_ranks(0);
  // Blocks without work wait as well: who comes next waits for this kernel alone.
  wait_for_predecessors();
  if (!active) return;
  float sums[4] = {};
#pragma unroll 1
  for (int base = 0; base < count; base += AHEAD) {
    uint4 tokens[AHEAD][2];
#pragma unroll
    for (int j = 0; j < AHEAD; ++j)
      read_inputs(x, first + base + j, lane, there && base + j < count, tokens[j]);
    if (base) read_ranks(base);
#pragma unroll
    for (int j = 0; j < AHEAD; ++j)
      if (base + j < count) multiply_block(sums, low[j], high[j], tokens[j]);
  }
  parts[warp][lane] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  __syncthreads();
  if (warp) return;
  const float* part = (const float*)&parts[0][lane];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = part[i];
#pragma unroll
    for (int w = 1; w < SEGMENTS; ++w) sum = __fadd_rn(sum, part[w * 128 + i]);
    int one = blockIdx.y * 8 + lane % 4 * 2 + i % 2;
    if (one < step.tokens)
      step.out[(long long)one * step.width + rank + i / 2 * 8] = sum;
  }
}
