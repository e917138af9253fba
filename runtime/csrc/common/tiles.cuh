// Loads of tiles for the tensor cores from shared memory. Include behind numbers.cuh.

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

__device__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply(c, a[0], a[1], a[2], a[3], b0, b1);
}

// Ask for 16 bytes that are there.
__device__ __forceinline__ void copy_all(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// If `wanted`, ask for 16 bytes, or for zeros where they are not there; without a branch.
__device__ __forceinline__ void copy_where(u32 to, const void* from, bool there, bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16, %2;\n}" ::
          "r"(to),
      "l"(from), "r"(there ? 16 : 0), "r"((int)wanted)
      : "memory");
}
