// What an adapter adds to a product: x A, which is there already, times B, in ascending order of
// the rank. It comes behind numbers.cuh.

struct Added {
  const float* shrunk;  // x A: float [tokens, width], `most` columns for each matrix
  const u16* b;         // [width, columns]
  const int* rank;      // how many of the columns of a matrix are there
  int width;
  int most;
};

// Ranks whose numbers are asked for at a time.
#define RANKS 8

// The sums for two columns of B and two tokens: x and y are the first column's. `first` says where
// the columns of x A begin that belong to each column's matrix.
__device__ __forceinline__ float4 expand(const Added& a, int rank, int columns, int2 column,
                                         int2 first, int2 token) {
  const float* x[2] = {a.shrunk + (long long)token.x * a.width,
                       a.shrunk + (long long)token.y * a.width};
  const u16* b[2] = {a.b + (long long)first.x * columns + column.x,
                     a.b + (long long)first.y * columns + column.y};
  float4 sum = {};
  for (int from = 0; from < rank; from += RANKS) {
    float4 numbers[RANKS];
    u16 weights[RANKS][2];
#pragma unroll
    for (int i = 0; i < RANKS; ++i) {
      int r = min(from + i, rank - 1);
      numbers[i] = make_float4(x[0][first.x + r], x[1][first.x + r], x[0][first.y + r],
                               x[1][first.y + r]);
      weights[i][0] = b[0][(long long)r * columns];
      weights[i][1] = b[1][(long long)r * columns];
    }
#pragma unroll
    for (int i = 0; i < RANKS; ++i)
      if (from + i < rank) {
        float low = number(weights[i][0]), high = number(weights[i][1]);
        sum.x = __fmaf_rn(numbers[i].x, low, sum.x);
        sum.y = __fmaf_rn(numbers[i].y, low, sum.y);
        sum.z = __fmaf_rn(numbers[i].z, high, sum.z);
        sum.w = __fmaf_rn(numbers[i].w, high, sum.w);
      }
  }
  return sum;
}
