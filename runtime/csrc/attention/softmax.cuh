// The numbers of attention, in the one order that every kind of block keeps (docs/kernels.md).
//
// A tile is 16 query rows of a warp. In the layout of the tensor cores' sums, lane 4 g + q holds
// columns 2 q and 2 q + 1 of each 8, of row g in the first two numbers and of row g + 8 in the
// other two. HALVES is 1 where a tile has no rows from 8 on.
//
// Running sums by split: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

#define LOG2_E 1.4426950408889634f

// exp(x - top), where `top` is at least x: 0 for an x of minus infinity, whatever `top` is.
__device__ float power(float x, float top) {
  float y;
  float base = top == MINUS_INFINITY ? 0.0f : top;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(__fsub_rn(x, base), LOG2_E)));
  return y;
}

__device__ float largest_of_four(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ float sum_of_four(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
}

// Factor of the sum of values.
__device__ float inverse(float l) { return l > 0.0f ? __frcp_rn(l) : 0.0f; }

// Weights of the sums of `own` and `next` in their merged sum, of which `top` is the maximum.
struct Merge {
  float top, own, next;
  __device__ Merge(float m, float next_m) {
    top = fmaxf(m, next_m);
    own = power(m, top);
    next = power(next_m, top);
  }
  __device__ float of(float a, float b) const { return __fmaf_rn(b, next, __fmul_rn(a, own)); }
};

// Partial sums of a tile's rows over a split, a span or all: maximum, sum, weighted sum of values.
template <int COLUMNS, int PARTS = HALVES>
struct Sums {
  float m[2], l[2], o[COLUMNS][4];

  __device__ void clear() {
#pragma unroll
    for (int half = 0; half < PARTS; ++half) m[half] = MINUS_INFINITY, l[half] = 0.0f;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
  }

  __device__ void add(const Sums& next) {
#pragma unroll
    for (int half = 0; half < PARTS; ++half) {
      Merge merge(m[half], next.m[half]);
      m[half] = merge.top;
      l[half] = merge.of(l[half], next.l[half]);
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i)
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) o[i][c] = merge.of(o[i][c], next.o[i][c]);
    }
  }
};

// The powers of a split's scores as the left operand of their product with the values; `seen` of
// its positions are seen by rows g and g + 8, and may be less than none or more than all.
template <int PARTS>
struct PowersOf {
  u32 p[4][4];
  float m[2], l[2];

  __device__ PowersOf(float (&s)[8][4], const int (&seen)[2]) {
    int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < PARTS; ++half) {
      float top = MINUS_INFINITY, sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[i][2 * half + c];
          if (i * 8 + first + c >= seen[half]) x = MINUS_INFINITY;
          top = fmaxf(top, x);
        }
      m[half] = top = largest_of_four(top);
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[i][2 * half + c];
          x = power(x, top);
          sum = __fadd_rn(sum, x);
        }
      l[half] = sum_of_four(sum);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        p[i / 2][i % 2 * 2 + half] =
            half < PARTS ? pack(s[i][2 * half], s[i][2 * half + 1]) : 0;
  }
};

typedef PowersOf<HALVES> Powers;

// Sixteen columns of the values at 16 positions, whose rows `values` says, times their powers.
__device__ void weigh_sixteen(const u32 (&p)[4], u32 values, float (&o)[2][4]) {
  u32 b[4];
  load_turned_tiles(b, values);
  multiply(o[0], p, b[0], b[1]);
  multiply(o[1], p, b[2], b[3]);
}

// Put a warp's scores where all of its tile find them.
__device__ void put_scores(float (&scores)[8 * HALVES][SCORES], int lane, int share,
                           const float (&own)[8 / SHARE][4]) {
  int g = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < 8 / SHARE; ++j)
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
      *(float2*)&scores[g + 8 * half][(share * (8 / SHARE) + j) * 8 + column] =
          make_float2(own[j][2 * half], own[j][2 * half + 1]);
}

__device__ void take_scores(const float (&scores)[8 * HALVES][SCORES], int lane,
                            float (&s)[8][4]) {
  int g = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float2 pair = *(const float2*)&scores[g + 8 * half][j * 8 + column];
      s[j][2 * half] = pair.x;
      s[j][2 * half + 1] = pair.y;
    }
}
