// RMS norms of float32 rows of INPUTS numbers, in the order of sums that docs/kernels.md fixes:
// segments of blocks of 64 inputs, in a block eight inputs of each half for each of four lanes.
// Include behind numbers.cuh.

constexpr int BLOCKS = (Config::INPUTS + 63) / 64;
constexpr int SEGMENTS = 8;
constexpr int MOST = (BLOCKS + SEGMENTS - 1) / SEGMENTS;

__device__ __forceinline__ int first_block(int segment) { return segment * BLOCKS / SEGMENTS; }

// The input with which half i of a block begins for lane q of four.
__device__ __forceinline__ int first_input(int block, int i, int q) {
  return block * 64 + i * 32 + q * 8;
}

struct Eight32 {
  float4 low, high;
};

// Eight numbers of a row; zeros behind its end.
__device__ __forceinline__ Eight32 read_row(const float* row, int input) {
  Eight32 x = {};
  if (Config::INPUTS % 64 == 0 || input < Config::INPUTS) {
    x.low = *(const float4*)(row + input);
    x.high = *(const float4*)(row + input + 4);
  }
  return x;
}

__device__ __forceinline__ float add_squares(float sum, const Eight32& x) {
  sum = __fmaf_rn(x.low.x, x.low.x, sum);
  sum = __fmaf_rn(x.low.y, x.low.y, sum);
  sum = __fmaf_rn(x.low.z, x.low.z, sum);
  sum = __fmaf_rn(x.low.w, x.low.w, sum);
  sum = __fmaf_rn(x.high.x, x.high.x, sum);
  sum = __fmaf_rn(x.high.y, x.high.y, sum);
  sum = __fmaf_rn(x.high.z, x.high.z, sum);
  return __fmaf_rn(x.high.w, x.high.w, sum);
}

// Inputs of lane q of four in a segment, two halves a block; zeros behind its end.
typedef Eight32 Held[MOST][2];

// Reads it, if the row is `there`, and gives the sum of its squares.
__device__ __forceinline__ float read_segment(Held& held, const float* row, bool there, int first,
                                              int count, int q) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < MOST; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      held[j][i] = Eight32{};
      if (there && j < count) held[j][i] = read_row(row, first_input(first + j, i, q));
    }
#pragma unroll
  for (int j = 0; j < MOST; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) sum = add_squares(sum, held[j][i]);
  return sum;
}

// The squares of a segment, of the parts of its four lanes.
__device__ __forceinline__ float add_lanes(float part) {
  part = __fadd_rn(part, __shfl_xor_sync(~0u, part, 1));
  return __fadd_rn(part, __shfl_xor_sync(~0u, part, 2));
}

__device__ __forceinline__ float norm_scale(float squares, float eps) {
  return rsqrtf(__fadd_rn(__fdiv_rn(squares, (float)Config::INPUTS), eps));
}

__device__ __forceinline__ u32 normed(float first, float second, float scale, u32 gains) {
  float2 gain = unpack(gains);
  return pack(__fmul_rn(__fmul_rn(first, scale), gain.x),
              __fmul_rn(__fmul_rn(second, scale), gain.y));
}

__device__ __forceinline__ uint4 normed_eight(const Eight32& x, float scale, uint4 gains) {
  return make_uint4(
      normed(x.low.x, x.low.y, scale, gains.x), normed(x.low.z, x.low.w, scale, gains.y),
      normed(x.high.x, x.high.y, scale, gains.z), normed(x.high.z, x.high.w, scale, gains.w));
}
