// Elements are float16, or bfloat16 with BFLOAT; two lie in 32 bits, the first in the low half.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// From compute capability 9.0 on a kernel can begin before the one before it has ended.
constexpr bool HAS_DEPENDENTS = __CUDA_ARCH__ >= 900;

__device__ __forceinline__ u32 pack(float first, float second) {
  u32 word;
  if constexpr (Config::BFLOAT)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

__device__ __forceinline__ float2 unpack(u32 word) {
  float2 both;
  if constexpr (Config::BFLOAT) {
    both.x = __uint_as_float(word << 16);
    both.y = __uint_as_float(word & 0xFFFF0000u);
  } else {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(both.x), "=f"(both.y)
        : "r"(word));
  }
  return both;
}

__device__ __forceinline__ u16 element(float x) { return (u16)pack(x, 0.0f); }
__device__ __forceinline__ float number(u16 x) { return unpack(x).x; }

// c += a * b by one mma.sync.m16n8k16: with lane = 4 g + q, a0 has row g and a1 row g + 8 of the
// inputs 2q, 2q + 1; a2 and a3 those of the inputs 8 further; b0 and b1 likewise column g; c0 and
// c1 are row g and columns 2q, 2q + 1; c2 and c3 row g + 8.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
  if constexpr (Config::BFLOAT)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void wait_for_end() {
  if constexpr (HAS_DEPENDENTS) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The kernels before this one have ended and what they wrote is seen; the next one may begin, or
// could already if `early`. Before it a kernel reads only what no kernel of its step writes. The
// first of a step is not early: what was before the step has ended when others of it begin.
// Positions, masks and start indices are read ahead of the wait. That they are final there rests on
// an assumption: a kernel that `launch_dependents` of its predecessor let begin sees what was
// complete at that one's own wait. PTX promises visibility behind `griddepcontrol.wait` alone, and
// does not call `launch_dependents` a release; it has held on compute capability 9.0.
__device__ __forceinline__ void let_next_begin() {
  if constexpr (HAS_DEPENDENTS) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_predecessors(bool early = false) {
  if (early) let_next_begin();
  wait_for_end();
  if (!early) let_next_begin();
}
