// Products of four warps together (wgmma, compute capability 9.0): 64 rows of A times WIDTHS times
// eight columns of B, sixteen inputs an instruction. Include behind ring.cuh. A warp has sixteen
// of the rows, and of eight columns what `multiply` of numbers.cuh gives.

#define PLACES_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PLACES_1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PLACES_2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define PLACES_3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PLACES_4 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define PLACES_5 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define FOUR(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN(c, i) FOUR(c, i), FOUR(c, i + 4), FOUR(c, i + 8), FOUR(c, i + 12)

// Descriptor of an operand, sixteen bytes a unit: rows of 128 bytes, eights of them one behind the
// other, chunk c of row r at place c ^ r % 8. Its sixteen inputs are two units.
__device__ __forceinline__ u64 operand(u32 address) {
  return 1ull << 62 | 64ull << 32 | 1ull << 16 | address / 16;
}

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// c += A B, or c = A B if not `more`: A in registers, as `multiply` has it, B in shared memory. One
// for each number of sums, whose places come before those of what is given.
#define MULTIPLY_REGISTERS(COUNT, SHAPE, KINDS, PLACES, NUMBERS, A0, A1, A2, A3, COLUMNS, MORE)   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " MORE ", 0;\n"                                  \
               "wgmma.mma_async.sync.aligned." SHAPE KINDS " {" PLACES "}, {" A0 ", " A1          \
               ", " A2 ", " A3 "}, " COLUMNS ", p, 1, 1, 0;\n}"                                   \
               : NUMBERS                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"((int)more))
#define PRODUCTS(COUNT, SHAPE, PLACES, NUMBERS, ...)                                              \
  __device__ __forceinline__ void multiply_registers(float (&c)[COUNT], const u32 (&a)[4],        \
                                                     u64 columns, bool more) {                    \
    if constexpr (Config::BFLOAT)                                                                 \
      MULTIPLY_REGISTERS(COUNT, SHAPE, ".f32.bf16.bf16", PLACES, ARGUMENT(NUMBERS), __VA_ARGS__); \
    else                                                                                          \
      MULTIPLY_REGISTERS(COUNT, SHAPE, ".f32.f16.f16", PLACES, ARGUMENT(NUMBERS), __VA_ARGS__);   \
  }                                                                                               \
  /* All of this thread's have ended; the operands keep the compiler from reading them before. */ \
  __device__ __forceinline__ void wait_products(float (&c)[COUNT]) {                              \
    asm volatile("wgmma.wait_group.sync.aligned 0;" : ARGUMENT(NUMBERS)::"memory");               \
  }
#define ARGUMENT(...) __VA_ARGS__

PRODUCTS(32, "m64n64k16", PLACES_0 PLACES_1, ARGUMENT(SIXTEEN(c, 0), SIXTEEN(c, 16)),
         "%32", "%33", "%34", "%35", "%36", "%37")
PRODUCTS(48, "m64n96k16", PLACES_0 PLACES_1 PLACES_2,
         ARGUMENT(SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32)),
         "%48", "%49", "%50", "%51", "%52", "%53")
PRODUCTS(64, "m64n128k16", PLACES_0 PLACES_1 PLACES_2 PLACES_3,
         ARGUMENT(SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), SIXTEEN(c, 48)),
         "%64", "%65", "%66", "%67", "%68", "%69")
PRODUCTS(96, "m64n192k16", PLACES_0 PLACES_1 PLACES_2 PLACES_3 PLACES_4 PLACES_5,
         ARGUMENT(SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), SIXTEEN(c, 48), SIXTEEN(c, 64),
                  SIXTEEN(c, 80)),
         "%96", "%97", "%98", "%99", "%100", "%101")

__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// All but the newest of this thread's have ended.
__device__ __forceinline__ void wait_but_newest() {
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// Barriers in shared memory, which count arrivals and bytes of copies.
__device__ __forceinline__ void begin_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive_at(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra AGAIN;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
