// Epilogue of a narrow product. Include behind what gemv.cu defines of a block.

// The sums of one item, of the segments in ascending order.
template <int COUNT = SEGMENTS>
__device__ __forceinline__ float4 add_segments(const float4* parts, int item) {
  float4 sum = parts[item];
#pragma unroll
  for (int w = 1; w < COUNT; ++w) {
    float4 part = parts[w * BETWEEN_PARTS + item];
    sum.x = __fadd_rn(sum.x, part.x);
    sum.y = __fadd_rn(sum.y, part.y);
    sum.z = __fadd_rn(sum.z, part.z);
    sum.w = __fadd_rn(sum.w, part.w);
  }
  return sum;
}

// An item is what a lane has of a fragment: rows g and g + 8 of a tile, tokens 2q and 2q + 1. Of an
// odd number of eights the last tile has its first eight rows alone.
__device__ __forceinline__ void place_of(int group, int item, int* row, int* token) {
  int lane = item % 32, fragment = item / 32;
  int eight = group * Config::EIGHTS + fragment / WIDTHS * 2;
  *row = (IS_GATED ? eight / 2 : eight) * 8 + lane / 4;
  *token = first_token() + fragment % WIDTHS * 8 + lane % 4 * 2;
}

__device__ __forceinline__ bool is_whole(int item) {
  return Config::EIGHTS % 2 == 0 || item / 32 / WIDTHS + 1 < TILES;
}

__device__ __forceinline__ float4 residuals_of(const Arguments& a, int group, int item) {
  int row, token;
  place_of(group, item, &row, &token);
  float4 x = make_float4(residual_of(a, row, token), residual_of(a, row, token + 1), 0, 0);
  if (is_whole(item)) {
    x.z = residual_of(a, row + 8, token);
    x.w = residual_of(a, row + 8, token + 1);
  }
  return x;
}

__device__ __forceinline__ Columns columns_of_item(const Arguments& a, int group, int item) {
  int row, token;
  place_of(group, item, &row, &token);
  return columns_of(a, row);
}

__device__ __forceinline__ float4 added_of(const Arguments& a, int rank, int group, int item,
                                           const Columns& columns) {
  int row, token;
  place_of(group, item, &row, &token);
  return added_to(a, rank, row, token, columns);
}

__device__ __forceinline__ void finish(const Arguments& a, int group, int item, float4 sum,
                                       float4 before, float4 added) {
  int row, token;
  place_of(group, item, &row, &token);
  if constexpr (IS_GATED) {
    finish_gated(a, row, token, sum.x, sum.z, added.x, added.z);
    finish_gated(a, row, token + 1, sum.y, sum.w, added.y, added.w);
    return;
  }
  finish_one(a, row, token, sum.x, before.x, added.x);
  finish_one(a, row, token + 1, sum.y, before.y, added.y);
  if (is_whole(item)) {
    finish_one(a, row + 8, token, sum.z, before.z, added.z);
    finish_one(a, row + 8, token + 1, sum.w, before.w, added.w);
  }
}
