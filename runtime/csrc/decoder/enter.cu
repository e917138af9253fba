#include "common/numbers.cuh"
#include "lora/added.cuh"

// The residual stream x [T, H] in float32: begun with the embeddings, added to behind a layer.

struct Arguments {
  const uint4* source;  // [T, H] elements
  float4* x;
  uint4* tap;   // where x goes as elements too, or 0
  uint4* cleared;  // mailbox of x A to reset (added.cuh)
  int eighths;  // of all of x
  int width;    // of a token
  int stride;   // from a token's tap to the next one's
  int numbers;  // of `cleared`, in fours
};

template <bool ADD>
__device__ void enter_stream(const Arguments& a) {
  wait_for_predecessors();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  for (int j = i; j < a.numbers; j += gridDim.x * blockDim.x)
    a.cleared[j] = make_uint4(UNTOLD, UNTOLD, UNTOLD, UNTOLD);
  if (i >= a.eighths) return;
  uint4 from = a.source[i];
  float2 b = unpack(from.x), c = unpack(from.y), d = unpack(from.z), e = unpack(from.w);
  float4 low = {b.x, b.y, c.x, c.y}, high = {d.x, d.y, e.x, e.y};
  if (ADD) {
    float4 x = a.x[2 * i], y = a.x[2 * i + 1];
    low = {x.x + low.x, x.y + low.y, x.z + low.z, x.w + low.w};
    high = {y.x + high.x, y.y + high.y, y.z + high.z, y.w + high.w};
  }
  a.x[2 * i] = low;
  a.x[2 * i + 1] = high;
  if (a.tap)
    a.tap[i / a.width * a.stride + i % a.width] = {pack(low.x, low.y), pack(low.z, low.w),
                                                   pack(high.x, high.y), pack(high.z, high.w)};
}

extern "C" __global__ void begin(const __grid_constant__ Arguments a) { enter_stream<false>(a); }

extern "C" __global__ void add(const __grid_constant__ Arguments a) { enter_stream<true>(a); }
