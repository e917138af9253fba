#include "common/numbers.cuh"
// Kernels of a draft's step beside products and attention. Sums go thread by thread in one order,
// so that a token's numbers do not depend on the others of its step.

constexpr u32 FULL = 0xFFFFFFFFu;
#define INFINITE __int_as_float(0x7F800000)
constexpr int WARPS = Config::BLOCK / 32;

// The sum over the block of one number a thread, the same in every thread.
__device__ float sum_block(float own, float* shared) {
  for (int other = 16; other; other >>= 1) own += __shfl_xor_sync(FULL, own, other);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < WARPS; ++warp) sum += shared[warp];
  return sum;
}

struct Fuse {
  float* x;              // [tokens, size]: the base's hidden states, fused, unless there are none
  const u16* own;    // [tokens, size]: the draft's own hidden states
  const u16* embeds;
  const u16* embedded_gain;
  const u16* fused_gain;
  u16* inputs;       // [tokens, 2 size]: embeddings and x, each normed
  int size;
  int given;  // whether there are hidden states of the base
  float eps;
};

// Completes the residual stream and puts what the projections take side by side: a block a token.
extern "C" __global__ void __launch_bounds__(Config::BLOCK) fuse(const __grid_constant__ Fuse step) {
  __shared__ float shared[WARPS];
  long long token = blockIdx.x;
  int size = step.size;
  float* x = step.x + token * size;
  const u16* own = step.own + token * size;
  const u16* embeds = step.embeds + token * size;
  u16* inputs = step.inputs + token * 2 * size;
  wait_for_predecessors();
  float squares = 0, embedded = 0;
  for (int i = threadIdx.x; i < size; i += Config::BLOCK) {
    float both = (step.given ? x[i] : 0.0f) + number(own[i]), embed = number(embeds[i]);
    x[i] = both;
    squares += both * both;
    embedded += embed * embed;
  }
  squares = rsqrtf(sum_block(squares, shared) / size + step.eps);
  embedded = rsqrtf(sum_block(embedded, shared) / size + step.eps);
  for (int i = threadIdx.x; i < size; i += Config::BLOCK) {
    inputs[i] = element(number(embeds[i]) * embedded * number(step.embedded_gain[i]));
    inputs[size + i] = element(x[i] * squares * number(step.fused_gain[i]));
  }
}

struct Select {
  const float* x;          // [rows, seq_len, size]
  const u16* context;  // [rows, seq_len, width]
  const long long* last;   // [rows, select_len]
  float* kept_x;           // [rows, select_len, size]
  u16* kept_context;   // [rows, select_len, width]
  long long* places;       // [rows, select_len]: 0 throughout
  int seq_len;
  int select_len;
  int size;
  int width;
};

// The selected tokens one behind the other: of the others keys and values are all that is needed.
extern "C" __global__ void __launch_bounds__(Config::BLOCK) select(const __grid_constant__ Select step) {
  wait_for_predecessors();
  long long chosen = blockIdx.x;
  long long token = chosen / step.select_len * step.seq_len + step.last[chosen];
  for (int i = threadIdx.x; i < step.size; i += Config::BLOCK)
    step.kept_x[chosen * step.size + i] = step.x[token * step.size + i];
  for (int i = threadIdx.x; i < step.width; i += Config::BLOCK)
    step.kept_context[chosen * step.width + i] = step.context[token * step.width + i];
  if (threadIdx.x == 0) step.places[chosen] = 0;
}

struct Scores {
  float* logits;   // [rows, vocabulary]
  float2* parts;   // [rows, parts]: greatest logit, and the sum of powers beside it
  int vocabulary;
};

constexpr int EACH = Config::PART / Config::BLOCK;

// A block is a part of PART logits of a row (grid: parts, rows).
extern "C" __global__ void __launch_bounds__(Config::BLOCK) measure(const __grid_constant__ Scores step) {
  __shared__ float shared[WARPS];
  int first = blockIdx.x * Config::PART + threadIdx.x;
  const float* logits = step.logits + (long long)blockIdx.y * step.vocabulary;
  wait_for_predecessors();
  float own[EACH], greatest = -INFINITE;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int place = first + i * Config::BLOCK;
    own[i] = place < step.vocabulary ? logits[place] : -INFINITE;
    greatest = fmaxf(greatest, own[i]);
  }
  for (int other = 16; other; other >>= 1)
    greatest = fmaxf(greatest, __shfl_xor_sync(FULL, greatest, other));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = greatest;
  __syncthreads();
  for (int warp = 0; warp < WARPS; ++warp) greatest = fmaxf(greatest, shared[warp]);
  float powers = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (!(own[i] == -INFINITE)) powers += expf(own[i] - greatest);
  powers = sum_block(powers, shared);
  if (threadIdx.x == 0)
    step.parts[(long long)blockIdx.y * gridDim.x + blockIdx.x] = make_float2(greatest, powers);
}

// Log-probabilities in place of logits; every block adds up the parts of its row, in their order.
extern "C" __global__ void __launch_bounds__(Config::BLOCK) normalise(const __grid_constant__ Scores step) {
  int first = blockIdx.x * Config::PART + threadIdx.x;
  float* logits = step.logits + (long long)blockIdx.y * step.vocabulary;
  wait_for_predecessors();
  const float2* parts = step.parts + (long long)blockIdx.y * gridDim.x;
  float greatest = -INFINITE, powers = 0;
  for (int part = 0; part < gridDim.x; ++part) greatest = fmaxf(greatest, parts[part].x);
  for (int part = 0; part < gridDim.x; ++part)
    powers += parts[part].y * expf(parts[part].x - greatest);
  float shift = greatest + logf(powers);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int place = first + i * Config::BLOCK;
    if (place < step.vocabulary) logits[place] -= shift;
  }
}
