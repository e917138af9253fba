// What an adapter adds to a product: x A, which is there already, times B, in ascending order of
// the rank. It comes behind numbers.cuh.

struct Added {
  const float* shrunk;  // x A: float [tokens, width], `most` columns for each matrix
  const u16* b;         // [width, columns]
  const int* rank;      // how many of the columns of a matrix are there
  int width;
  int most;
};

// The sum for a column of B, of a matrix whose columns of x A begin with `first`.
__device__ __forceinline__ float expand(const Added& a, int columns, int first, int column,
                                        int token) {
  const float* x = a.shrunk + (long long)token * a.width + first;
  const u16* b = a.b + (long long)first * columns + column;
  int rank = *a.rank;
  float sum = 0;
#pragma unroll 8
  for (int r = 0; r < rank; ++r) sum = __fmaf_rn(x[r], number(b[(long long)r * columns]), sum);
  return sum;
}
