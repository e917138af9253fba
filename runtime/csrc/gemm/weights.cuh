// Weights on their way from a matrix to the instructions: eight rows of 64 inputs in a stage, and
// what a lane has of them as elements. With WEIGHT_BITS 8 or 4 they are unsigned integers n, which
// mean element((n - z) * s): scales s lie by SCALE_BLOCK inputs of a row, and with ZEROS zero
// points z; without, z is the middle. It comes behind ring.cuh.

#ifndef WEIGHT_BITS
#define WEIGHT_BITS 16
#endif

#define ROW_BYTES ((long long)INPUTS * WEIGHT_BITS / 8)

#if WEIGHT_BITS == 16

#define WEIGHT_BYTES EIGHT_BYTES
typedef Eight Rows;

template <bool ONCE>
__device__ __forceinline__ void copy_weights(u32 stage, const Rows& rows, int block, int lane) {
  copy_eight<INPUTS, ONCE>(stage, rows, block, lane);
}

__device__ __forceinline__ uint4 read_weights_half(const char* stage, int, int lane, int i) {
  return read_half(stage, lane, i);
}

#else

static_assert(INPUTS % 64 == 0, "a block of 64 inputs has whole scales");
#define STAGE_ROW (WEIGHT_BITS * 8)
#define SCALES_OF_ROW (INPUTS / SCALE_BLOCK)
#define WEIGHT_BYTES (STAGE_ROW * 8 + 32 + ZEROS * 32)

// The first of eight rows of integers, of their scales and of their zero points.
struct Rows {
  const char* first;
  int rows;
  const char* scale;
  const char* zero;
};

// The word that `from` lies in.
__device__ __forceinline__ void copy_word(u32 to, const char* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"((u64)from & ~3ull),
               "r"(there ? 4 : 0)
               : "memory");
}

// Where sixteen bytes of a row lie in a stage, so that the lanes of `read_weights` meet no bank
// twice.
__device__ __forceinline__ int place_of_chunk(int row, int chunk) {
#if WEIGHT_BITS == 8
  chunk ^= (row / 2 & 1) * 2;
#else
  chunk ^= row / 4;
#endif
  return row * STAGE_ROW + chunk * 16;
}

// A warp copies 64 inputs of eight rows, and of each row the word with their scales and that with
// their zero points.
template <bool ONCE>
__device__ __forceinline__ void copy_weights(u32 stage, const Rows& rows, int block, int lane) {
  constexpr int chunks = STAGE_ROW / 16;
  int row = lane / chunks, chunk = lane % chunks;
  if (row < 8) {
    bool there = row < rows.rows;
    const char* from = rows.first + row * ROW_BYTES + block * STAGE_ROW + chunk * 16;
    if (!there) from = rows.first;
    if (ONCE)
      copy_once(stage + place_of_chunk(row, chunk), from, there);
    else
      copy_ahead(stage + place_of_chunk(row, chunk), from, there);
  }
  if (lane < 8) {
    bool there = lane < rows.rows;
    int index = lane * SCALES_OF_ROW + block * 64 / SCALE_BLOCK;
    copy_word(stage + STAGE_ROW * 8 + lane * 4, rows.scale + index * 2, there);
#if ZEROS
    copy_word(stage + STAGE_ROW * 8 + 32 + lane * 4, rows.zero + index, there);
#endif
  }
}

#if BFLOAT
#define ONE 0x3F803F80u
#define NOTHING 0x80008000u
#define PAIRS ".bf16x2"
#else
#define PAIRS ".f16x2"
#endif

__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn" PAIRS " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ u32 add_pair(u32 a, u32 b) {
#if BFLOAT
  return multiply_add(a, ONE, b);
#else
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#endif
}

__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
#if BFLOAT
  return multiply_add(a, b, NOTHING);  // minus zero, which leaves a product's sign as it is
#else
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#endif
}

// Bits of `word` that `mask` has, and those of `others`.
__device__ __forceinline__ u32 taken(u32 word, u32 mask, u32 others) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(word), "r"(mask), "r"(others));
  return d;
}

// Integers put into the last bits of a large number make it larger by them: of 1024 in float16, of
// 128 in bfloat16. Taking it off again, and the zero point with it, is exact, and so the product
// with the scale is the only rounding. `z` and `s` lie in both halves of a word.
#if WEIGHT_BITS == 8
__device__ __forceinline__ uint4 widened(uint2 bytes, u32 z, u32 s) {
#if BFLOAT
  // Eight bits are more than a bfloat16 has behind its first: by float32, whose product is exact.
  float scale = __uint_as_float(s << 16), middle = 8388608.0f + (float)(z & 255);
  auto pair = [&](u32 word, u32 first, u32 second) {
    float one = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440u + first));
    float other = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440u + second));
    return pack(__fmul_rn(__fsub_rn(one, middle), scale),
                __fmul_rn(__fsub_rn(other, middle), scale));
  };
#else
  u32 middle = 0xE400E400u | z;
  auto pair = [&](u32 word, u32 first, u32 second) {
    u32 raised = __byte_perm(word, 0x64646464u, 0x4040u + first + second * 256);
    return multiply_pair(add_pair(raised, middle), s);
  };
#endif
  return make_uint4(pair(bytes.x, 0, 1), pair(bytes.x, 2, 3), pair(bytes.y, 0, 1),
                    pair(bytes.y, 2, 3));
}
#else
// Word i of the result has integers i and i + 4.
__device__ __forceinline__ uint4 widened(u32 word, u32 z, u32 s) {
#if BFLOAT
  u32 middle = 0xC300C300u | z;
  auto pair = [&](int i) {
    u32 raised = taken(word >> 4 * i, 0x000F000Fu, 0x43004300u);
    return multiply_pair(add_pair(raised, middle), s);
  };
  return make_uint4(pair(0), pair(1), pair(2), pair(3));
#else
  u32 middle = 0xE400E400u | z, sixteenth = 0xD400D400u | z << 4;
  auto low = [&](u32 bits) {
    return multiply_pair(add_pair(taken(bits, 0x000F000Fu, 0x64006400u), middle), s);
  };
  auto high = [&](u32 bits) {  // sixteen times the integer
    u32 raised = taken(bits, 0x00F000F0u, 0x64006400u);
    return multiply_pair(multiply_add(raised, 0x2C002C00u, sixteenth), s);
  };
  return make_uint4(low(word), high(word), low(word >> 8), high(word >> 8));
#endif
}
#endif

// What lane 4 g + q has of row g, as `read_half` says, but for the order of int4.
__device__ __forceinline__ uint4 read_weights_half(const char* stage, int block, int lane, int i) {
  int row = lane / 4, q = lane % 4, index = row * SCALES_OF_ROW + block * 64 / SCALE_BLOCK;
  u32 scales = *(const u32*)(stage + STAGE_ROW * 8 + row * 4);
  u32 second = SCALE_BLOCK == 32 ? i : index % 2, z = (WEIGHT_BITS == 8 ? 128 : 8) * 0x10001u;
  u32 s = __byte_perm(scales, 0, second ? 0x3232 : 0x1010);
#if ZEROS
  u32 zeros = *(const u32*)(stage + STAGE_ROW * 8 + 32 + row * 4) >> index % 4 * 8;
  z = __byte_perm(zeros, 0, SCALE_BLOCK == 32 && i ? 0x4141 : 0x4040);
#endif
#if WEIGHT_BITS == 8
  const char* place = stage + place_of_chunk(row, 2 * i + q / 2) + q % 2 * 8;
  return widened(*(const uint2*)place, z, s);
#else
  return widened(*(const u32*)(stage + place_of_chunk(row, i) + q * 4), z, s);
#endif
}

#endif

__device__ __forceinline__ void read_weights(const char* stage, int block, int lane,
                                             uint4 (&halves)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) halves[i] = read_weights_half(stage, block, lane, i);
}

// Half a block of a token in the order in which weights are: integers i and i + 4 of int4 go
// together.
__device__ __forceinline__ uint4 as_weights(const uint4& b) {
#if WEIGHT_BITS == 4
  return make_uint4(__byte_perm(b.x, b.z, 0x5410), __byte_perm(b.x, b.z, 0x7632),
                    __byte_perm(b.y, b.w, 0x5410), __byte_perm(b.y, b.w, 0x7632));
#else
  return b;
#endif
}

// The four instructions of a block.
__device__ __forceinline__ void multiply_weights(float (&c)[4], const uint4 (&low)[2],
                                                 const uint4 (&high)[2], const uint4 (&b)[2]) {
  uint4 x[2] = {as_weights(b[0]), as_weights(b[1])};
  multiply_block(c, low, high, x);
}
