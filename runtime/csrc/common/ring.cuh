// Asynchronous copies into shared memory, and the stages that they fill: eight rows of 64 inputs.
// Include behind numbers.cuh. Quantised weights have stages of their own (weights.cuh).

constexpr int EIGHT_BYTES = 1024;

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

// Sixteen bytes, or zeros where there are none to copy.
__device__ __forceinline__ void copy_ahead(u32 to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

// The same of what is read once: it is the first to make way in the L2 cache.
__device__ __forceinline__ void copy_once(u32 to, const void* from, bool there) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(there ? 16 : 0), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the newest LEFT groups of copies of this thread have arrived.
template <int LEFT>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// The first of eight rows of a row-major matrix; none where `rows` is 0.
struct Eight {
  const char* first;
  int rows;
};

// A warp copies 64 inputs of eight rows, 128 bytes a row and 16 a lane. Sixteen bytes of odd rows
// lie half a row further round, so that the lanes of `read_eight` meet no bank twice.
template <int INPUTS_OF_ROW, bool ONCE = false>
__device__ __forceinline__ void copy_eight(u32 stage, Eight eight, int block, int lane) {
  int chunk = lane % 8, input = block * 64 + chunk * 8;
  bool inside = INPUTS_OF_ROW % 64 == 0 || input < INPUTS_OF_ROW;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int row = lane / 8 + 4 * i;
    bool there = inside && row < eight.rows;
    const char* from = eight.first + ((long long)row * INPUTS_OF_ROW + input) * 2;
    u32 to = stage + row * 128 + (chunk ^ (row & 1) * 4) * 16;
    if (!there) from = eight.first;
    if (ONCE)
      copy_once(to, from, there);
    else
      copy_ahead(to, from, there);
  }
}

// Place of lane 4 g + q in row g: inputs 32 i + 8 q to 32 i + 8 q + 7 in halves[i]. Its words x
// and y serve instruction 2 i of the block, z and w instruction 2 i + 1.
__device__ __forceinline__ int place_of_half(int lane, int i) {
  int row = lane / 4, q = lane % 4;
  return row * 128 + ((4 * i + q) ^ (row & 1) * 4) * 16;
}

__device__ __forceinline__ uint4 read_half(const char* stage, int lane, int i) {
  return *(const uint4*)(stage + place_of_half(lane, i));
}

__device__ __forceinline__ void read_eight(const char* stage, int lane, uint4 (&halves)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) halves[i] = read_half(stage, lane, i);
}

// The two instructions of half a block: sixteen rows of weights and eight tokens.
__device__ __forceinline__ void multiply_half(float (&c)[4], const uint4& low, const uint4& high,
                                              const uint4& b) {
  multiply(c, low.x, high.x, low.y, high.y, b.x, b.y);
  multiply(c, low.z, high.z, low.w, high.w, b.z, b.w);
}

// The four instructions of a block.
__device__ __forceinline__ void multiply_block(float (&c)[4], const uint4 (&low)[2],
                                               const uint4 (&high)[2], const uint4 (&b)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) multiply_half(c, low[i], high[i], b[i]);
}
