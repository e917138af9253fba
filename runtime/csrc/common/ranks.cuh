// Scores are ranked by one integer, "rank": the inverted sortable bits of the score above the
// token id (M. Herf, "Radix tricks", 2001). The smallest rank is the highest score, the lowest id
// among equals, and no two tokens have the same.

typedef unsigned int u32;
typedef unsigned long long u64;

#define NEVER 0xFFFFFFFFFFFFFFFFull
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

__device__ u32 sortable(float x) {
  // Adding zero makes -0.0 and 0.0, which are equal, one bit pattern.
  u32 bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float from_sortable(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

__device__ u64 rank_of(float x, int id) { return (u64)~sortable(x) << 32 | (u32)id; }
__device__ float score_of(u64 rank) { return from_sortable(~(u32)(rank >> 32)); }

