#include "common/ranks.cuh"
#include "common/last_block.cuh"
#include "step/steps.cuh"
// A chain of a draft engine: each level's best token is a node of the tree, and what the next step
// runs. Hidden states are copied as HIDDEN.

#define THREADS 256
#define WARPS (THREADS / 32)

typedef HIDDEN hidden;

struct Chain {
  const float* logits;    // [rows, vocab]
  const int* full_ids;    // [vocab], or null
  u64* best;              // [rows]: the inverted rank, 0 before and after
  u32* done;              // [rows]: for is_last_block
  int* ids;               // [rows, nodes]
  const INDEX* lengths;   // the position of the first node behind the root
  INDEX* filled;          // [rows]: what the draft's cache holds before the next step
  const hidden* fresh;    // [rows, width]: hidden states of the step that gave the logits
  hidden* given;          // [rows, width]: what the next one is given
  int vocab;
  int nodes;
  int width;
  int level;
};

__device__ u64 least_of_block(u64 own, u64* shared) {
  for (int i = 16; i; i >>= 1) own = min(own, __shfl_xor_sync(~0u, own, i));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
  __syncthreads();
  for (int warp = 0; warp < WARPS; ++warp) own = min(own, shared[warp]);
  return own;
}

// Grid x has the parts of a row of logits, y the rows. The last block of a row goes on with what
// all of them found.
extern "C" __global__ void __launch_bounds__(THREADS) follow_chain(Feed feed, Chain chain) {
  __shared__ u64 shared[WARPS];
  let_next_begin();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  int row = blockIdx.y;
  const float* logits = chain.logits + (long long)row * chain.vocab;
  u64 best = NEVER;
  bool goes_on = chain.level + 2 < chain.nodes;
  const hidden* fresh = chain.fresh + (long long)row * chain.width;
  // On its way while the best is looked for.
  hidden first = hidden();
  if (goes_on && threadIdx.x < chain.width) first = fresh[threadIdx.x];
#pragma unroll 4
  for (int id = blockIdx.x * THREADS + threadIdx.x; id < chain.vocab; id += gridDim.x * THREADS) {
    float score = logits[id];
    best = min(best, rank_of(score == score ? score : MINUS_INFINITY, id));
  }
  best = least_of_block(best, shared);
  if (gridDim.x > 1) {
    if (threadIdx.x == 0) atomicMax(chain.best + row, ~best);
    if (!is_last_block(chain.done + row, gridDim.x)) return;
    best = ~*(volatile u64*)(chain.best + row);
    __syncthreads();
    if (threadIdx.x == 0) chain.best[row] = 0;
  }
  int id = (int)(u32)best, token = chain.full_ids ? chain.full_ids[id] : id, level = chain.level;
  if (threadIdx.x == 0) chain.ids[(long long)row * chain.nodes + 1 + level] = token;
  if (!goes_on) return;
  if (threadIdx.x == 0) {
    feed.positions[row] = chain.lengths[row] + (INDEX)level;
    feed.select[row] = 0;
    if (feed.mask) feed.mask[row] = 1;
    if (feed.packed) feed.packed[row] = 1;
    if (level) chain.filled[row] += 1;
  }
  embed(feed, token, row);
  hidden* given = chain.given + (long long)row * chain.width;
  if (threadIdx.x < chain.width) given[threadIdx.x] = first;
  for (int i = threadIdx.x + THREADS; i < chain.width; i += THREADS) given[i] = fresh[i];
}
