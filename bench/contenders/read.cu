// Reads `pieces` pieces of 16 bytes, UNROLL of them at once in every thread, and keeps none in the
// first level of cache. BLOCK * UNROLL divides `pieces`; `nothing` is written if all are zero.

struct Arguments {
    const uint4* data;
    unsigned* nothing;
    unsigned long long pieces;
};

__device__ __forceinline__ uint4 load(const uint4* from)
{
    uint4 piece;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "l"(from));
    return piece;
}

extern "C" __global__ void __launch_bounds__(BLOCK) read_once(const Arguments given)
{
    constexpr unsigned long long TILE = BLOCK * UNROLL;
    unsigned seen = 0;
    for (unsigned long long first = blockIdx.x * TILE; first < given.pieces;
         first += gridDim.x * TILE) {
        uint4 pieces[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            pieces[i] = load(given.data + first + i * BLOCK + threadIdx.x);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            seen |= pieces[i].x | pieces[i].y | pieces[i].z | pieces[i].w;
        }
    }
    if (seen == 0) {
        *given.nothing = 1;
    }
}
