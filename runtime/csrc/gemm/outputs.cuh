#include "lora/added.cuh"
// Arguments and epilogue of a product. Include behind ring.cuh. OUTPUT is
// NUMBERS, RESIDUAL or GATED; MATRICES lie one below the other.

enum Output { NUMBERS, RESIDUAL, GATED };

constexpr bool IS_GATED = Config::OUTPUT == GATED;
// True if an adapter's x A B is a part of the sums, not added behind them.
constexpr bool ADDED_BEHIND = Config::ADDED && !Config::SHRINK_STAGES;

struct Matrix {
  const char* values;
  const char* scale;
  const char* zero;
  const u16* bias;
  int rows;
  int unused;
};

struct Arguments {
  Matrix matrices[3];
  const void* inputs;     // element [tokens, INPUTS], or float [.., INPUTS] that is normed
  const u16* gain;        // [INPUTS]
  const long long* last;  // [rows, select_len], which of its row's tokens are taken; or null
  void* out;              // float or element [tokens, rows]
  u16* tap;               // element [tokens, tap_stride]; or null
  int tokens;
  int rows;    // of all matrices, or of `gate` alone
  int groups;  // of as many rows as a block takes at a time
  int tap_stride;
  int seq_len;
  int select_len;
  float eps;
  int early;   // whether the next kernel may begin before this one's inputs are there
  Added added;
};

// The row of `inputs` of token t.
__device__ __forceinline__ long long row_of(const Arguments& a, int token) {
  if (a.last == nullptr) return token;
  return (long long)(token / a.select_len) * a.seq_len + a.last[token];
}

// Eight rows of the matrices, counted as tiles have them: a tile's first eight and its last eight
// are those of gate and up where these are multiplied with one another.
__device__ __forceinline__ Rows eight_of(const Arguments& a, int index) {
  int row = index * 8;
  int matrix = 0;
  if constexpr (IS_GATED) {
    matrix = index % 2;
    row = index / 2 * 8;
  } else {
#pragma unroll
    for (int i = 0; i + 1 < Config::MATRICES; ++i)
      if (matrix == i && row >= a.matrices[i].rows) row -= a.matrices[i].rows, matrix = i + 1;
  }
  const Matrix* m = &a.matrices[0];
  if ((IS_GATED || Config::MATRICES > 1) && matrix == 1) m = &a.matrices[1];
  if (Config::MATRICES > 2 && matrix == 2) m = &a.matrices[2];
  Rows rows = {m->values, max(0, min(8, m->rows - row))};
  if constexpr (IN_INTEGERS) {
    if (rows.rows == 0) row = 0;
    rows.first += row * ROW_BYTES;
    rows.scale = m->scale + (long long)row * SCALES_OF_ROW * 2;
    rows.zero = m->zero + (long long)row * SCALES_OF_ROW;
  } else if (rows.rows) {
    rows.first += row * ROW_BYTES;
  }
  return rows;
}

__device__ __forceinline__ float bias_of(const Arguments& a, int row) {
#pragma unroll
  for (int i = 0; i < Config::MATRICES; ++i) {
    if (row < a.matrices[i].rows) return a.matrices[i].bias ? number(a.matrices[i].bias[row]) : 0;
    row -= a.matrices[i].rows;
  }
  return 0;
}

// Index of the matrix that has a row.
__device__ __forceinline__ int matrix_of(const Arguments& a, int row) {
  int matrix = 0;
#pragma unroll
  for (int i = 0; i + 1 < Config::MATRICES; ++i)
    if (matrix == i && row >= a.matrices[i].rows) row -= a.matrices[i].rows, matrix = i + 1;
  return matrix;
}

__device__ __forceinline__ int rank_of(const Arguments& a) {
  return Config::ADDED ? *a.added.rank : 0;
}

// Columns of B of a row and the one eight further, or of gate and up, and the first elements of x A
// that belong to their matrices.
struct AddedPlace {
  int2 column, first;

  __device__ __forceinline__ bool apart() const {
    return IS_GATED || (Config::MATRICES > 1 && first.x != first.y);
  }
};

__device__ __forceinline__ AddedPlace added_place(const Arguments& a, int row) {
  int most = a.added.most;
  if constexpr (IS_GATED) {
    row = min(row, a.rows - 1);
    return {make_int2(row, a.rows + row), make_int2(0, most)};
  }
  int2 rows = make_int2(min(row, a.rows - 1), min(row + 8, a.rows - 1));
  return {rows, make_int2(matrix_of(a, rows.x) * most, matrix_of(a, rows.y) * most)};
}

// Elements of B of a lane for the first sixteen ranks, which no kernel of the graph writes.
struct Columns {
  uint2 fours[2];
};

__device__ __forceinline__ Columns columns_of(const Arguments& a, int row) {
  Columns columns = {};
  if constexpr (!Config::ADDED) return columns;
  AddedPlace place = added_place(a, row);
  const u16* b = a.added.b + threadIdx.x % 4 * 4;
  columns.fours[0] = *(const uint2*)(b + (long long)place.column.x * a.added.most);
  columns.fours[1] = *(const uint2*)(b + (long long)place.column.y * a.added.most);
  return columns;
}

// Addend of an adapter to a lane's sums of a tile whose x A is there already.
__device__ __forceinline__ float4 added_to(const Arguments& a, int rank, int row, int token,
                                           const Columns& columns) {
  if constexpr (!Config::ADDED) return float4{};
  AddedPlace place = added_place(a, row);
  int own = token + threadIdx.x % 32 / 4 - threadIdx.x % 4 * 2;
  const float* x = a.added.shrunk + (long long)min(own, a.tokens - 1) * a.added.width;
  const u16* b[2] = {a.added.b + (long long)place.column.x * a.added.most,
                     a.added.b + (long long)place.column.y * a.added.most};
  Expansion expansion;
  int r = threadIdx.x % 4 * 4;
  float4 numbers[2] = {*(const float4*)(x + place.first.x + r), *(const float4*)(x + place.first.y + r)};
  expansion.add_sixteen(numbers, columns.fours, place.apart(), r, rank);
  expansion.add(x, b, place.first, place.apart(), 16, rank);
  return expansion.sum(place.apart());
}

__device__ __forceinline__ float4 added_to(const Arguments& a, int rank, int row, int token) {
  return added_to(a, rank, row, token, columns_of(a, row));
}

// Residual stream at the place to which the sums of `finish` are added.
__device__ __forceinline__ float residual_of(const Arguments& a, int row, int token) {
  if (row >= a.rows || token >= a.tokens) return 0;
  return ((const float*)a.out)[(long long)token * a.rows + row];
}

__device__ __forceinline__ void finish_one(const Arguments& a, int row, int token, float sum,
                                           float before, float added) {
  if (row >= a.rows || token >= a.tokens) return;
  float* out = (float*)a.out + (long long)token * a.rows + row;
  if constexpr (ADDED_BEHIND) sum = __fadd_rn(sum, added);
  if constexpr (Config::BIASED) sum = __fadd_rn(sum, bias_of(a, row));
  if constexpr (Config::OUTPUT == RESIDUAL) {
    sum = __fadd_rn(before, sum);
    if (a.tap) a.tap[(long long)token * a.tap_stride + row] = element(sum);
  }
  *out = sum;
}

__device__ __forceinline__ u16 activation(float gate, float up) {
  float silu = __fdividef(gate, 1.0f + __expf(-gate));
  return element(__fmul_rn(silu, up));
}

__device__ __forceinline__ void finish_gated(const Arguments& a, int row, int token, float gate,
                                             float up, float added_gate, float added_up) {
  if (row >= a.rows || token >= a.tokens) return;
  if constexpr (ADDED_BEHIND) {
    gate = __fadd_rn(gate, added_gate);
    up = __fadd_rn(up, added_up);
  }
  ((u16*)a.out)[(long long)token * a.rows + row] = activation(gate, up);
}
