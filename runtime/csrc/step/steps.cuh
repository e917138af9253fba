// Inputs of a step. INDEX is the type of indices, TABLE and OUT the element types of the
// embedding table and of the step's buffer: 2 bytes (HALF, BFLOAT) or float. Without CONVERT both
// are the same type and rows are copied as UNIT.

#ifdef CONVERT
__device__ float widen(float x) { return x; }
__device__ void narrow(float x, float* out) { *out = x; }

struct half_bits { unsigned short bits; };
__device__ float widen(half_bits x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
__device__ void narrow(float x, half_bits* out) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
}

struct bfloat_bits { unsigned short bits; };
__device__ float widen(bfloat_bits x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ void narrow(float x, bfloat_bits* out) {
  unsigned bits = __float_as_uint(x);
  // To nearest, ties to even; a NaN keeps its sign and stays a NaN.
  out->bits = x != x ? (bits >> 16) | 0x40 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

__device__ void copy_row(const void* from, void* to, int width) {
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    narrow(widen(((const TABLE*)from)[i]), (OUT*)to + i);
}
#else
__device__ void copy_row(const void* from, void* to, int width) {
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    ((UNIT*)to)[i] = ((const UNIT*)from)[i];
}
#endif

// The kernel behind this one may be put in place, if it waits by itself: those of our own steps do.
__device__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct Feed {
  const char* table;
  char* embeds;
  INDEX* positions;
  INDEX* select;
  const INDEX* start;
  const int* next_tokens;
  // [rows, steps], then the lengths [rows], then the first positions [rows], -1 for the start.
  const long long* token_ids;
  unsigned char* mask;  // [rows, steps, steps], or null
  unsigned* packed;     // [rows, steps, ceil(steps / 32)], or null
  long long table_pitch;       // bytes of a row of the table
  long long embeds_pitch;
  int vocab;
  int width;  // elements of a row, or units of UNIT
  int steps;
  int rows;
};

__device__ void embed(const Feed& feed, long long token, long long place) {
  token = token < 0 ? 0 : token >= feed.vocab ? feed.vocab - 1 : token;
  copy_row(feed.table + token * feed.table_pitch, feed.embeds + place * feed.embeds_pitch,
           feed.width);
}

