// Low-rank part of a product: x A times B. Include behind numbers.cuh. With SHRINK_STAGES
// blocks of the product multiply by A, and ask for so many stages ahead (shrink.cuh).

struct Added {
  float* shrunk;    // x A: float [tokens, width], `most` numbers for each matrix
  const u16* a;     // A, a column of it a row: [width, inputs]
  const u16* b;     // B: [columns, most]
  const int* rank;  // active ranks of a matrix
  float* cleared;   // x A of the step's next product, which this one resets to UNTOLD
  int width;
  int most;
  int numbers;  // of `cleared`
  int blocks;   // of the grid that multiply by A
};

// Marker of an element of x A that no block of the grid has written yet: a NaN that no sum is, as a
// NaN of theirs has all bits.
constexpr u32 UNTOLD = 0x7FC00000u;

__device__ __forceinline__ void tell(float* to, float x) {
  u32 bits = __float_as_uint(x);
  if (bits == UNTOLD) bits = 0x7FFFFFFFu;
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

__device__ __forceinline__ uint4 ask_told(const float* from) {
  uint4 bits;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(from)
               : "memory");
  return bits;
}

__device__ __forceinline__ bool is_told(uint4 bits) {
  return bits.x != UNTOLD && bits.y != UNTOLD && bits.z != UNTOLD && bits.w != UNTOLD;
}

__device__ __forceinline__ float4 read_told(const float* from, uint4 bits) {
  while (!is_told(bits)) bits = ask_told(from);
  return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                     __uint_as_float(bits.w));
}

__device__ __forceinline__ float4 read_told(const float* from) {
  return read_told(from, ask_told(from));
}

// c += a * b by one mma.sync.m16n8k8 of numbers with 11 bits: as `multiply`, but a0 and a1 have input
// q alone, a2 and a3 the one four further, and so b0 and b1.
__device__ __forceinline__ void multiply_floats(float (&c)[4], const float (&a)[4], float b0,
                                                float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// Addend of a warp's tile: with lane = 4 g + q, rows g and g + 8, tokens 2q and 2q + 1. Of
// sixteen ranks lane q of four has four in a row. Elements have 11 bits; x A is taken in two parts,
// each with sums of its own. Where the rows are of two matrices each has its own numbers of x A.
struct Expansion {
  float high[2][4] = {}, low[2][4] = {};

  // Ranks `from` to `rank`: x is that of token g, b those of rows g and g + 8, and `first` where the
  // numbers of x A begin that belong to their matrices. With TOLD other blocks write them.
  template <bool TOLD = false>
  __device__ __forceinline__ void add(const float* x, const u16* (&b)[2], int2 first, bool apart,
                                      int from, int rank) {
    int q = threadIdx.x % 4;
    for (int r = from + 4 * q; from < rank; from += 16, r += 16) {
      uint2 fours[2] = {*(const uint2*)(b[0] + r), *(const uint2*)(b[1] + r)};
      float4 numbers[2];
      const float* from_r[2] = {x + first.x + r, x + first.y + r};
      numbers[0] = TOLD ? read_told(from_r[0]) : *(const float4*)from_r[0];
      if (apart) numbers[1] = TOLD ? read_told(from_r[1]) : *(const float4*)from_r[1];
      add_sixteen(numbers, fours, apart, r, rank);
    }
  }

  // Sixteen ranks, of which this lane has four from r on.
  __device__ __forceinline__ void add_sixteen(const float4 (&numbers)[2], const uint2 (&fours)[2],
                                              bool apart, int r, int rank) {
    float weights[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 some = unpack(fours[i].x), others = unpack(fours[i].y);
      weights[i][0] = some.x, weights[i][1] = some.y;
      weights[i][2] = others.x, weights[i][3] = others.y;
    }
    if (apart) {
      add_four(0, numbers[0], weights[0], nullptr, r, rank);
      add_four(1, numbers[1], nullptr, weights[1], r, rank);
    } else {
      add_four(0, numbers[0], weights[0], weights[1], r, rank);
    }
  }

  __device__ __forceinline__ void add_four(int part, float4 numbers, const float* first,
                                           const float* second, int r, int rank) {
    float x[4] = {numbers.x, numbers.y, numbers.z, numbers.w}, large[4], small[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (r + i >= rank) x[i] = 0;
      large[i] = __uint_as_float(__float_as_uint(x[i]) & 0xFFFFE000u);
      small[i] = __fsub_rn(x[i], large[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float a[4] = {first ? first[i] : 0, second ? second[i] : 0, first ? first[i + 1] : 0,
                    second ? second[i + 1] : 0};
      multiply_floats(high[part], a, large[i], large[i + 1]);
      multiply_floats(low[part], a, small[i], small[i + 1]);
    }
  }

  __device__ __forceinline__ float4 sum(bool apart) const {
    return make_float4(__fadd_rn(high[0][0], low[0][0]), __fadd_rn(high[0][1], low[0][1]),
                       __fadd_rn(apart ? high[1][2] : high[0][2], apart ? low[1][2] : low[0][2]),
                       __fadd_rn(apart ? high[1][3] : high[0][3], apart ? low[1][3] : low[0][3]));
  }
};
