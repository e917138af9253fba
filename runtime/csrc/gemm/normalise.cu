#include "common/numbers.cuh"
#include "gemm/norm.cuh"
#include "common/staged.cuh"

// RMS norms of whole rows, a warp a token: lane 4 w + q is lane q of segment w. With STAGED they are
// written as the stages of a product have them.

// True if a lane keeps its inputs of a token.
constexpr bool ALL_HELD = MOST <= 5;

struct Arguments {
  const float* inputs;    // [.., INPUTS]
  const u16* gain;        // [INPUTS]
  const long long* last;  // [rows, select_len], which of its row's tokens are taken; or null
  u16* out;               // element [tokens, stride]
  int tokens;
  int stride;
  int seq_len;
  int select_len;
  float eps;
  int unused;
};

__device__ __forceinline__ uint4 gains_of(const Arguments& a, int block, int i, int q, bool there) {
  int input = first_input(block, i, q);
  if (!there || (Config::INPUTS % 64 && input >= Config::INPUTS)) return uint4{};
  return *(const uint4*)(a.gain + input);
}

__device__ __forceinline__ void write(const Arguments& a, int token, int input, uint4 eight) {
  if constexpr (Config::STAGED) {
    u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ((u32*)a.out)[staged_word(token, a.tokens, input / 2 + i)] = words[i];
  } else {
    *(uint4*)(a.out + (long long)token * a.stride + input) = eight;
  }
}

extern "C" __global__ void __launch_bounds__(128) normalise(const __grid_constant__ Arguments a) {
  int token = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4;
  int first = first_block(lane / 4), count = first_block(lane / 4 + 1) - first;
  uint4 gains[MOST][2];
  if constexpr (ALL_HELD) {
#pragma unroll
    for (int j = 0; j < MOST; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) gains[j][i] = gains_of(a, first + j, i, q, j < count);
  }
  wait_for_predecessors();
  if (token >= a.tokens) return;
  long long source = token;
  if (a.last) source = (long long)(token / a.select_len) * a.seq_len + a.last[token];
  const float* row = a.inputs + source * Config::INPUTS;
  Held held;
  float part = 0;
  if constexpr (ALL_HELD) {
    part = read_segment(held, row, true, first, count, q);
  } else {
#pragma unroll 4
    for (int j = 0; j < count; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        part = add_squares(part, read_row(row, first_input(first + j, i, q)));
  }
  part = add_lanes(part);
  float squares = __shfl_sync(~0u, part, 0);
#pragma unroll
  for (int w = 1; w < SEGMENTS; ++w) squares = __fadd_rn(squares, __shfl_sync(~0u, part, w * 4));
  float scale = norm_scale(squares, a.eps);
#pragma unroll(ALL_HELD ? MOST : 4)
  for (int j = 0; j < MOST; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int input = first_input(first + j, i, q);
      if (j >= count || (Config::INPUTS % 64 && input >= Config::INPUTS)) continue;
      if constexpr (ALL_HELD)
        write(a, token, input, normed_eight(held[j][i], scale, gains[j][i]));
      else
        write(a, token, input,
              normed_eight(read_row(row, input), scale, gains_of(a, first + j, i, q, true)));
    }
}
