#include "numbers.cuh"
// The first product of an adapter: x A, for as many columns as the active one has. Sums go by one
// order for any number of tokens: thread by thread, lane by lane, warp by warp.
//
// INPUTS is K, TOKENS (1 to 8) go to a block. NORMED says that x is float32 and to be normed: sums
// are of x times the gain, and the norm's scale is multiplied in the end.

#define BLOCK 256
#define WARPS (BLOCK / 32)
#define COLUMNS 8
#define VALUES (TOKENS * COLUMNS)
#define EACH ((INPUTS + BLOCK - 1) / BLOCK)
// Pieces of A that a thread asks for before it waits.
#define AHEAD (EACH < 12 ? EACH : 12)

#if NORMED
typedef float entry;
__device__ __forceinline__ float value(float x) { return x; }
#else
typedef u16 entry;
__device__ __forceinline__ float value(u16 x) { return number(x); }
#endif

struct Shrink {
  const entry* x;  // [tokens, INPUTS]
  const u16* gain;
  const u16* a;  // [INPUTS, width]
  const int* rank;   // of the active adapter
  float* out;        // [tokens, width]
  float eps;
  int tokens;
  int width;  // columns of all targets
  int most;   // columns of a target
};

// Adds what a thread has of piece i: eight columns of A times an input of every token.
__device__ __forceinline__ void add_products(const Shrink& step, int first, int i, uint4 eight,
                                             float (&sums)[VALUES], float (&squares)[TOKENS]) {
  int k = i * BLOCK + threadIdx.x;
  if (k >= INPUTS) return;
  float2 pairs[] = {unpack(eight.x), unpack(eight.y), unpack(eight.z), unpack(eight.w)};
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    if (first + t >= step.tokens) return;
    float x = value(step.x[(long long)(first + t) * INPUTS + k]);
#if NORMED
    squares[t] = __fmaf_rn(x, x, squares[t]);
    x = __fmul_rn(x, number(step.gain[k]));
#endif
#pragma unroll
    for (int c = 0; c < COLUMNS / 2; ++c) {
      sums[t * COLUMNS + 2 * c] = __fmaf_rn(x, pairs[c].x, sums[t * COLUMNS + 2 * c]);
      sums[t * COLUMNS + 2 * c + 1] = __fmaf_rn(x, pairs[c].y, sums[t * COLUMNS + 2 * c + 1]);
    }
  }
}

// Blocks: eight columns (x), TOKENS tokens (y).
extern "C" __global__ void __launch_bounds__(BLOCK, 1) shrink(const __grid_constant__ Shrink step) {
  __shared__ float shared[WARPS][VALUES];
#if NORMED
  __shared__ float norms[WARPS][TOKENS];
#endif
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int column = blockIdx.x * COLUMNS, first = blockIdx.y * TOKENS;
  bool active = column % step.most < *step.rank;
  const u16* columns = step.a + (long long)threadIdx.x * step.width + column;
  long long pitch = (long long)BLOCK * step.width;
  uint4 a[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    a[i] = make_uint4(0, 0, 0, 0);
    if (active && i * BLOCK + threadIdx.x < INPUTS) a[i] = *(const uint4*)(columns + i * pitch);
  }
  // Blocks without work wait as well: who comes next waits for this kernel alone.
  wait_for_predecessors();
  if (!active) return;
  float sums[VALUES], squares[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) squares[t] = 0;
#pragma unroll
  for (int v = 0; v < VALUES; ++v) sums[v] = 0;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) add_products(step, first, i, a[i], sums, squares);
#pragma unroll 2
  for (int i = AHEAD; i < EACH; ++i) {
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (i * BLOCK + threadIdx.x < INPUTS) eight = *(const uint4*)(columns + i * pitch);
    add_products(step, first, i, eight, sums, squares);
  }
  // Each exchange leaves half of the values to either of two lanes, then each lane adds up its own.
  int held = VALUES;
#pragma unroll
  for (int other = 16; other; other >>= 1) {
    if (held > 1) {
      held /= 2;
      bool upper = lane & other;
#pragma unroll
      for (int v = 0; v < VALUES / 2; ++v)
        if (v < held) {
          float given = upper ? sums[v] : sums[v + held];
          float kept = upper ? sums[v + held] : sums[v];
          sums[v] = kept + __shfl_xor_sync(~0u, given, other);
        }
    } else {
      sums[0] += __shfl_xor_sync(~0u, sums[0], other);
    }
  }
  // The lane's bits, from the highest on, say which values it holds.
  int place = 0, size = VALUES;
#pragma unroll
  for (int other = 16; other; other >>= 1)
    if (size > 1) {
      size /= 2;
      if (lane & other) place += size;
    }
#pragma unroll
  for (int v = 0; v < (VALUES + 31) / 32; ++v) shared[warp][place + v] = sums[v];
#if NORMED
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
    for (int other = 16; other; other /= 2)
      squares[t] = __fadd_rn(squares[t], __shfl_xor_sync(~0u, squares[t], other));
    if (lane == 0) norms[warp][t] = squares[t];
  }
#endif
  __syncthreads();
  if (threadIdx.x >= VALUES) return;
  int token = first + threadIdx.x / COLUMNS;
  float sum = 0;
  for (int w = 0; w < WARPS; ++w) sum = __fadd_rn(sum, shared[w][threadIdx.x]);
#if NORMED
  float square = 0;
  for (int w = 0; w < WARPS; ++w) square = __fadd_rn(square, norms[w][threadIdx.x / COLUMNS]);
  sum = __fmul_rn(sum, rsqrtf(square / INPUTS + step.eps));
#endif
  if (token < step.tokens)
    step.out[(long long)token * step.width + column + threadIdx.x % COLUMNS] = sum;
}
