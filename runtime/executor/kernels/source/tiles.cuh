// How tiles of the tensor cores come from shared memory. It comes behind numbers.cuh.

#define MINUS_INFINITY __int_as_float(0xff800000)

// Four tiles of 8 rows of 16 bytes; lane i gives the address of row i % 8 of tile i / 8.
__device__ void load_tiles(u32 (&b)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address)
               : "memory");
}

__device__ void load_turned_tiles(u32 (&b)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address)
               : "memory");
}

// What an earlier kernel has written, in the order of the program.
__device__ u32 read_word(const u32* from) {
  u32 x;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
