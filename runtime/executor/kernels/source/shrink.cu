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
// And of x, afterwards, at a time.
#define PIECES (TOKENS == 1 ? 12 : TOKENS < 8 ? 16 / TOKENS : 4)

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

// The inputs of pieces `first` on, of every token, which are all asked for before any is used.
__device__ __forceinline__ void read_pieces(const Shrink& step, int token, int first,
                                            float (&x)[PIECES][TOKENS]) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    int k = (first + i) * BLOCK + threadIdx.x;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      // Tokens that are not there are read as the last one; nobody stores what they give.
      long long row = min(token + t, step.tokens - 1);
      x[i][t] = k < INPUTS ? value(step.x[row * INPUTS + k]) : 0;
    }
  }
}

// Adds what a thread has of a piece: eight columns of A times an input of every token.
__device__ __forceinline__ void add_products(const float (&x)[TOKENS], uint4 eight, u16 gain,
                                             float (&sums)[VALUES], float (&squares)[TOKENS]) {
  float2 pairs[] = {unpack(eight.x), unpack(eight.y), unpack(eight.z), unpack(eight.w)};
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    float one = x[t];
#if NORMED
    squares[t] = __fmaf_rn(one, one, squares[t]);
    one = __fmul_rn(one, number(gain));
#endif
#pragma unroll
    for (int c = 0; c < COLUMNS / 2; ++c) {
      sums[t * COLUMNS + 2 * c] = __fmaf_rn(one, pairs[c].x, sums[t * COLUMNS + 2 * c]);
      sums[t * COLUMNS + 2 * c + 1] = __fmaf_rn(one, pairs[c].y, sums[t * COLUMNS + 2 * c + 1]);
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
  u16 gains[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    bool there = active && i * BLOCK + threadIdx.x < INPUTS;
    a[i] = make_uint4(0, 0, 0, 0);
    gains[i] = 0;
    if (there) a[i] = *(const uint4*)(columns + i * pitch);
#if NORMED
    if (there) gains[i] = step.gain[i * BLOCK + threadIdx.x];
#endif
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
  for (int from = 0; from < AHEAD; from += PIECES) {
    float x[PIECES][TOKENS];
    read_pieces(step, first, from, x);
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
      if (from + i < AHEAD) add_products(x[i], a[from + i], gains[from + i], sums, squares);
  }
#pragma unroll 1
  for (int from = AHEAD; from < EACH; from += PIECES) {
    float x[PIECES][TOKENS];
    read_pieces(step, first, from, x);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      uint4 eight = make_uint4(0, 0, 0, 0);
      u16 gain = 0;
      if ((from + i) * BLOCK + threadIdx.x < INPUTS) {
        eight = *(const uint4*)(columns + (from + i) * pitch);
#if NORMED
        gain = step.gain[(from + i) * BLOCK + threadIdx.x];
#endif
      }
      add_products(x[i], eight, gain, sums, squares);
    }
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
