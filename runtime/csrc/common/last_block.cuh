// Work that the last block of a group takes up behind all others, in the same launch.

// True for the last of `blocks` blocks that come here; it sees what the others wrote. `done` is 0
// before and after. The fences of one thread serve the block, as barriers come around them.
__device__ bool is_last_block(unsigned* done, unsigned blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(done, 1u) == blocks - 1;
    if (last) *done = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

