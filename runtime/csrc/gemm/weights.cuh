// Weights on their way from a matrix to the instructions: eight rows of 64 inputs in a stage, and
// what a lane has of them as elements. With WEIGHT_BITS 8 or 4 they are unsigned integers n, which
// mean element((n - z) * s): scales s lie by SCALE_BLOCK inputs of a row, and with ZEROS zero
// points z; without, z is the middle. Include behind ring.cuh.

constexpr bool IN_INTEGERS = Config::WEIGHT_BITS < 16;
constexpr long long ROW_BYTES = (long long)Config::INPUTS * Config::WEIGHT_BITS / 8;
constexpr int STAGE_ROW = Config::WEIGHT_BITS * 8;
// Inputs that share a scale: all of a row, where there are none.
constexpr int SCALED = IN_INTEGERS ? Config::SCALE_BLOCK : Config::INPUTS;
constexpr int SCALES_OF_ROW = Config::INPUTS / SCALED;
constexpr int WEIGHT_BYTES = IN_INTEGERS ? STAGE_ROW * 8 + 32 + Config::ZEROS * 32 : EIGHT_BYTES;

static_assert(!IN_INTEGERS || Config::INPUTS % 64 == 0, "a block of 64 inputs has whole scales");

// The first of eight rows of weights, and of integers that of their scales and of their zero points.
struct Rows {
  const char* first;
  int rows;
  const char* scale;
  const char* zero;
};

// First scale of a block of inputs in a row.
__device__ __forceinline__ int first_scale(int block) {
  return block * 64 / SCALED;
}

// The word that `from` lies in.
__device__ __forceinline__ void copy_word(u32 to, const char* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"((u64)from & ~3ull),
               "r"(there ? 4 : 0)
               : "memory");
}

// Place of sixteen bytes of a row in a stage, so that the lanes of `read_weights` meet no bank
// twice.
__device__ __forceinline__ int place_of_chunk(int row, int chunk) {
  chunk ^= Config::WEIGHT_BITS == 8 ? (row / 2 & 1) * 2 : row / 4;
  return row * STAGE_ROW + chunk * 16;
}

// A warp copies 64 inputs of eight rows, and of each row the word with their scales and that with
// their zero points.
template <bool ONCE>
__device__ __forceinline__ void copy_weights(u32 stage, const Rows& rows, int block, int lane) {
  if constexpr (!IN_INTEGERS) {
    copy_eight<Config::INPUTS, ONCE>(stage, Eight{rows.first, rows.rows}, block, lane);
    return;
  }
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
    int index = lane * SCALES_OF_ROW + first_scale(block);
    copy_word(stage + STAGE_ROW * 8 + lane * 4, rows.scale + index * 2, there);
    if (Config::ZEROS) copy_word(stage + STAGE_ROW * 8 + 32 + lane * 4, rows.zero + index, there);
  }
}

__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
  u32 d;
  if constexpr (Config::BFLOAT)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ u32 add_pair(u32 a, u32 b) {
  constexpr u32 ones = 0x3F803F80u;
  if constexpr (Config::BFLOAT) return multiply_add(a, ones, b);
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
  constexpr u32 minus_zeros = 0x80008000u;  // which leave a product's sign as it is
  if constexpr (Config::BFLOAT) return multiply_add(a, b, minus_zeros);
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
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
__device__ __forceinline__ uint4 widened_bytes(uint2 bytes, u32 z, u32 s) {
  auto pair = [&](u32 word, u32 first, u32 second) {
    if constexpr (Config::BFLOAT) {
      // Eight bits are more than a bfloat16 has behind its first: by float32, whose product is exact.
      float scale = __uint_as_float(s << 16), middle = 8388608.0f + (float)(z & 255);
      float one = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440u + first));
      float other = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440u + second));
      return pack(__fmul_rn(__fsub_rn(one, middle), scale),
                  __fmul_rn(__fsub_rn(other, middle), scale));
    } else {
      u32 raised = __byte_perm(word, 0x64646464u, 0x4040u + first + second * 256);
      return multiply_pair(add_pair(raised, 0xE400E400u | z), s);
    }
  };
  return make_uint4(pair(bytes.x, 0, 1), pair(bytes.x, 2, 3), pair(bytes.y, 0, 1),
                    pair(bytes.y, 2, 3));
}

// Word i of the result has integers i and i + 4.
__device__ __forceinline__ uint4 widened_nibbles(u32 word, u32 z, u32 s) {
  if constexpr (Config::BFLOAT) {
    u32 middle = 0xC300C300u | z;
    auto pair = [&](int i) {
      u32 raised = taken(word >> 4 * i, 0x000F000Fu, 0x43004300u);
      return multiply_pair(add_pair(raised, middle), s);
    };
    return make_uint4(pair(0), pair(1), pair(2), pair(3));
  }
  u32 middle = 0xE400E400u | z, sixteenth = 0xD400D400u | z << 4;
  auto low = [&](u32 bits) {
    return multiply_pair(add_pair(taken(bits, 0x000F000Fu, 0x64006400u), middle), s);
  };
  auto high = [&](u32 bits) {  // sixteen times the integer
    u32 raised = taken(bits, 0x00F000F0u, 0x64006400u);
    return multiply_pair(multiply_add(raised, 0x2C002C00u, sixteenth), s);
  };
  return make_uint4(low(word), high(word), low(word >> 8), high(word >> 8));
}

// Weights of lane 4 g + q in row g, as `read_half` says, but for the order of int4.
__device__ __forceinline__ uint4 read_weights_half(const char* stage, int block, int lane, int i) {
  if constexpr (!IN_INTEGERS) return read_half(stage, lane, i);
  int row = lane / 4, q = lane % 4, index = row * SCALES_OF_ROW + first_scale(block);
  u32 scales = *(const u32*)(stage + STAGE_ROW * 8 + row * 4);
  u32 second = Config::SCALE_BLOCK == 32 ? i : index % 2;
  u32 z = (Config::WEIGHT_BITS == 8 ? 128 : 8) * 0x10001u;
  u32 s = __byte_perm(scales, 0, second ? 0x3232 : 0x1010);
  if constexpr (Config::ZEROS) {
    u32 zeros = *(const u32*)(stage + STAGE_ROW * 8 + 32 + row * 4) >> index % 4 * 8;
    z = __byte_perm(zeros, 0, Config::SCALE_BLOCK == 32 && i ? 0x4141 : 0x4040);
  }
  if constexpr (Config::WEIGHT_BITS == 8) {
    const char* place = stage + place_of_chunk(row, 2 * i + q / 2) + q % 2 * 8;
    return widened_bytes(*(const uint2*)place, z, s);
  }
  return widened_nibbles(*(const u32*)(stage + place_of_chunk(row, i) + q * 4), z, s);
}

__device__ __forceinline__ void read_weights(const char* stage, int block, int lane,
                                             uint4 (&halves)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) halves[i] = read_weights_half(stage, block, lane, i);
}

// Half a block of a token in the order in which weights are: integers i and i + 4 of int4 go
// together.
__device__ __forceinline__ uint4 as_weights(const uint4& b) {
  if constexpr (Config::WEIGHT_BITS == 4)
    return make_uint4(__byte_perm(b.x, b.z, 0x5410), __byte_perm(b.x, b.z, 0x7632),
                      __byte_perm(b.y, b.w, 0x5410), __byte_perm(b.y, b.w, 0x7632));
  return b;
}

// The four instructions of a block.
__device__ __forceinline__ void multiply_weights(float (&c)[4], const uint4 (&low)[2],
                                                 const uint4 (&high)[2], const uint4 (&b)[2]) {
  uint4 x[2] = {as_weights(b[0]), as_weights(b[1])};
  multiply_block(c, low, high, x);
}
