#include "ranks.cuh"
#include "sampling_rows.cuh"
#include "sampling_draw.cuh"
#include "last_block.cuh"
// Walks through token trees: at each node the token is picked as for a decode step, and a child
// with that token is the next node.

#define NODES 1024

struct Walk {
  const int* ids;  // [rows, width]
  const int* parents;
  Best* scans;     // [rows * width]: the best of each node's logits; null where not scanned
  Partial* partial;
  u32* done;       // [rows]: for is_last_block
  int* paths;      // [rows, 1 + levels]: how many nodes (-1: the root is not finite), then these
  int width;
  int levels;
};

// Grid y has the nodes of all rows. A row with settings of its own scores is scanned on its walk.
extern "C" __global__ void __launch_bounds__(256) scan_nodes(Batch batch, Walk walk) {
  int place = blockIdx.y;
  Row row = batch.rows[place / walk.width];
  if (row.flags) return;
  const float* logits = batch.logits + (long long)place * batch.vocab;
  Scan scan = scan_row(batch, row, 0, logits, blockIdx.x * blockDim.x + threadIdx.x,
                       gridDim.x * blockDim.x);
  Best found = join<8>(scan);
  if (threadIdx.x == 0 && combine(walk.partial + place, &found)) walk.scans[place] = found;
}

__device__ int child_with(const Walk& walk, int r, int node, int token) {
  __shared__ int child;
  __syncthreads();
  if (threadIdx.x == 0) child = walk.width;
  __syncthreads();
  long long tree = (long long)r * walk.width;
  for (int i = threadIdx.x; i < walk.width; i += THREADS)
    if (walk.parents[tree + i] == node && walk.ids[tree + i] == token) atomicMin(&child, i);
  __syncthreads();
  return child;
}

// One block a row. What the first thread appends to the history is read by all of them at the
// next node: `child_with` synchronises.
extern "C" __global__ void __launch_bounds__(THREADS) walk_trees(Batch batch, Walk walk) {
  __shared__ Shared shared;
  int r = blockIdx.x;
  Row row = batch.rows[r];
  int* path = walk.paths + (long long)r * (1 + walk.levels);
  int count = 0;
  for (int node = 0; node < walk.width && count < walk.levels;) {
    long long place = (long long)r * walk.width + node;
    Spot spot = {r, batch.logits + place * batch.vocab, (u64)batch.start[r] + count + 1,
                 batch.results + (long long)r * walk.levels + count};
    Best best;
    if (walk.scans && !row.flags)
      best = walk.scans[place];
    else
      best = join<THREADS / 32>(scan_row(batch, row, r, spot.logits, threadIdx.x, THREADS));
    float highest = score_of(best.best);
    if (best.bad || !finite(highest)) break;
    int token = row.temperature > 0 ? draw(batch, row, spot, highest, shared) : (int)(u32)best.best;
    if (row.logprobs >= 0) report(batch, row, spot, from_sortable(best.raw), token, shared);
    ++count;
    if (threadIdx.x == 0) {
      path[count] = node;
      spot.result->token = token;
      accept(batch, row, r, token);
    }
    node = child_with(walk, r, node, token);
  }
  if (threadIdx.x == 0) path[0] = count ? count : -1;
}

// What was found for a node, whose place is left as it was before the first block; -1 where it is
// not finite.
__device__ int take_greedy(Partial* partial) {
  u64 best = atomicExch(&partial->best, NEVER);
  bool bad = atomicExch(&partial->bad, 0u);
  return bad || !finite(score_of(best)) ? -1 : (int)(u32)best;
}

// For rows that are all greedy, without settings of their own: grid x has the parts of a node's
// logits, y the nodes of all rows. The last block of a row links its nodes and walks.
extern "C" __global__ void __launch_bounds__(256) walk_greedy(Batch batch, Walk walk) {
  __shared__ int tokens[NODES];
  __shared__ int next[NODES];
  int place = blockIdx.y, r = place / walk.width;
  const float* logits = batch.logits + (long long)place * batch.vocab;
  Scan scan = scan_row(batch, Row(), r, logits, blockIdx.x * blockDim.x + threadIdx.x,
                       gridDim.x * blockDim.x);
  Best found = join<8>(scan);
  if (threadIdx.x == 0) {
    atomicMin(&walk.partial[place].best, found.best);
    if (found.bad) atomicOr(&walk.partial[place].bad, 1u);
  }
  if (!is_last_block(walk.done + r, gridDim.x * walk.width)) return;
  long long tree = (long long)r * walk.width;
  for (int i = threadIdx.x; i < walk.width; i += blockDim.x) {
    tokens[i] = take_greedy(walk.partial + tree + i);
    next[i] = walk.width;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < walk.width; i += blockDim.x) {
    int parent = walk.parents[tree + i];
    if (parent >= 0 && parent < i && walk.ids[tree + i] == tokens[parent])
      atomicMin(next + parent, i);
  }
  __syncthreads();
  if (threadIdx.x) return;
  int* path = walk.paths + (long long)r * (1 + walk.levels);
  int count = 0;
  for (int node = 0; node < walk.width && tokens[node] >= 0; node = next[node]) {
    batch.results[(long long)r * walk.levels + count].token = batch.next_tokens[r] = tokens[node];
    path[++count] = node;
  }
  path[0] = count ? count : -1;
}
