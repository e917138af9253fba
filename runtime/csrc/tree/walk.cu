#include "common/ranks.cuh"
#include "sampling/rows.cuh"
#include "sampling/draw.cuh"
#include "common/last_block.cuh"
#include "sampling/wide.cuh"
// Walks through token trees: at each node the token is sampled as for a decode step, and a child
// with that token is the next node. Either all nodes are sampled first, or those that are
// walked one after the other.

#define NODES 1024

struct Walk {
  const int* ids;  // [rows, width]
  const int* parents;
  Best* scans;     // [rows * width]: the best of each node's logits
  Result* picks;   // [rows * width]: what is drawn and reported behind each node
  Partial* partial;
  u32* done;       // [rows]: for is_last_block
  int* paths;      // [rows, 1 + levels]: how many nodes (-1: the root is not finite), then these
  int width;
  int levels;
};

struct Way {
  int nodes[NODES];
  int path[NODES];
  int depth;
};

// The tokens on the way from the root to a node; every thread gets the place to sample at.
__device__ Spot spot_at(const Batch& batch, const Walk& walk, int place, Way& way) {
  int r = place / walk.width, node = place % walk.width;
  long long tree = (long long)r * walk.width;
  for (int i = threadIdx.x; i <= node; i += blockDim.x) way.nodes[i] = walk.parents[tree + i];
  __syncthreads();
  if (threadIdx.x == 0) {
    int depth = 0;
    // Every parent comes before its node.
    for (int at = node; at > 0; at = min(way.nodes[at], at - 1)) way.path[depth++] = at;
    way.depth = depth;
  }
  __syncthreads();
  int depth = way.depth;
  for (int i = threadIdx.x; i < depth; i += blockDim.x)
    way.path[i] = walk.ids[tree + way.path[i]];
  __syncthreads();
  return {r, batch.logits + (long long)place * batch.vocab, (u64)batch.start[r] + depth + 1,
          walk.picks + place, way.path, depth};
}

// A place without a node.
__device__ bool empty(const Walk& walk, int place) {
  return place % walk.width && walk.parents[place] < 0;
}

// Grid y has the nodes of all rows.
extern "C" __global__ void __launch_bounds__(256) scan_nodes(Batch batch, Walk walk) {
  __shared__ Way way;
  int place = blockIdx.y, r = place / walk.width;
  if (empty(walk, place)) return;
  Row row = batch.rows[r];
  Spot spot = {r, batch.logits + (long long)place * batch.vocab};
  if (row.flags & HISTORY) spot = spot_at(batch, walk, place, way);
  Scan scan = scan_row(batch, row, spot, blockIdx.x * blockDim.x + threadIdx.x,
                       gridDim.x * blockDim.x);
  Best found = join<8>(scan);
  if (threadIdx.x == 0 && combine(walk.partial + place, &found)) walk.scans[place] = found;
}

__device__ bool failed(const Best& best) { return best.bad || !finite(score_of(best.best)); }

// Draws (z 0) and log probabilities (z 1): x has the blocks of one, y the nodes.
template <bool LAST>
__device__ void draw_nodes(const Batch& batch, const Walk& walk, const Wide& wide) {
  __shared__ Shared shared;
  __shared__ Way way;
  int place = wide.first + blockIdx.y;
  Row row = batch.rows[place / walk.width];
  bool wanted = blockIdx.z ? row.logprobs >= LAST : row.temperature > 0;
  if (!wanted || empty(walk, place)) return;
  Best best = walk.scans[place];
  if (failed(best)) return;
  Spot spot = spot_at(batch, walk, place, way);
  if (blockIdx.z) {
    Raw source = {spot, from_sortable(best.raw)};
    LAST ? pick_raw(batch, row, source, wide, shared) : weigh_raw(batch, row, source, wide, shared);
    return;
  }
  Tempered source = {batch, row, spot, score_of(best.best)};
  int token = LAST ? pick(source, wide, shared) : weigh(source, wide, shared);
  if (token >= 0 && threadIdx.x == 0) spot.result->token = token;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    weigh_nodes(Batch batch, Walk walk, Wide wide) {
  draw_nodes<false>(batch, walk, wide);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    pick_nodes(Batch batch, Walk walk, Wide wide) {
  draw_nodes<true>(batch, walk, wide);
}

// Such a row's mask is that of node 0: its walk ends there.
__device__ bool masked(const Row& row) { return row.flags & MASK; }

// The row's caches hold so many tokens more. All of its samples have been drawn.
__device__ void fill(const Batch& batch, int r, int count) {
  ((INDEX*)batch.start)[r] += count;
}

// The first node's token and those of its sampled children, by one block of a row.
struct Trail {
  int tokens[NODES];  // sampled behind each node, -1 where it is not finite
  int next[NODES];
  unsigned short nodes[NODES];
  int count;
};

__device__ void follow(const Batch& batch, const Walk& walk, const Row& row, int r, Trail& trail) {
  long long tree = (long long)r * walk.width;
  for (int i = threadIdx.x; i < walk.width; i += blockDim.x) trail.next[i] = walk.width;
  __syncthreads();
  for (int i = threadIdx.x; i < walk.width; i += blockDim.x) {
    int parent = walk.parents[tree + i];
    if (parent >= 0 && parent < i && walk.ids[tree + i] == trail.tokens[parent])
      atomicMin(trail.next + parent, i);
  }
  __syncthreads();
  int* path = walk.paths + (long long)r * (1 + walk.levels);
  if (threadIdx.x == 0) {
    int count = 0, most = masked(row) ? 1 : walk.width;
    for (int node = 0; node < walk.width && trail.tokens[node] >= 0 && count < most;
         node = trail.next[node])
      trail.nodes[count++] = node;
    trail.count = count;
    path[0] = count ? count : -1;
    if (count) {
      batch.next_tokens[r] = trail.tokens[trail.nodes[count - 1]];
      fill(batch, r, count);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < trail.count; i += blockDim.x) {
    int node = trail.nodes[i], token = trail.tokens[node];
    path[1 + i] = node;
    Result* result = batch.results + (long long)r * walk.levels + i;
    if (row.logprobs >= 0) {
      *result = walk.picks[tree + node];
      result->chosen = batch.logits[(tree + node) * batch.vocab + token];
    }
    result->token = token;
    if (row.flags & HISTORY) {
      u32* past = batch.history + (long long)r * batch.pitch + token;
      atomicOr(past, SEEN);
      atomicAdd(past, 1u);
    }
  }
}

// One block a row, behind the sampling of all nodes.
extern "C" __global__ void __launch_bounds__(256) follow_picks(Batch batch, Walk walk) {
  __shared__ Trail trail;
  int r = blockIdx.x;
  Row row = batch.rows[r];
  for (int i = threadIdx.x; i < walk.width; i += blockDim.x) {
    long long place = (long long)r * walk.width + i;
    if (empty(walk, place)) continue;
    Best best = walk.scans[place];
    int token = row.temperature > 0 ? walk.picks[place].token : (int)(u32)best.best;
    trail.tokens[i] = failed(best) ? -1 : token;
  }
  follow(batch, walk, row, r, trail);
}

// Best token of a node, whose place is left as it was before the first block; -1 where it is
// not finite.
__device__ int take_greedy(Partial* partial) {
  u64 best = atomicExch(&partial->best, NEVER);
  bool bad = atomicExch(&partial->bad, 0u);
  return bad || !finite(score_of(best)) ? -1 : (int)(u32)best;
}

// For rows that are all greedy, without settings of their own: grid x has the parts of a node's
// logits, y the nodes of all rows. The last block of a row walks.
extern "C" __global__ void __launch_bounds__(256) walk_greedy(Batch batch, Walk walk) {
  __shared__ Trail trail;
  int place = blockIdx.y, r = place / walk.width;
  // Not read from the batch: the logits would wait for it.
  Row row = {};
  row.logprobs = -1;
  Spot spot = {r, batch.logits + (long long)place * batch.vocab};
  Scan scan = scan_row(batch, row, spot, blockIdx.x * blockDim.x + threadIdx.x,
                       gridDim.x * blockDim.x);
  Best found = join<8>(scan);
  if (threadIdx.x == 0) {
    atomicMin(&walk.partial[place].best, found.best);
    if (found.bad) atomicOr(&walk.partial[place].bad, 1u);
  }
  if (!is_last_block(walk.done + r, gridDim.x * walk.width)) return;
  for (int i = threadIdx.x; i < walk.width; i += blockDim.x)
    trail.tokens[i] = take_greedy(walk.partial + (long long)r * walk.width + i);
  follow(batch, walk, row, r, trail);
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

// One block a row, for trees of more nodes than are worth picking for. What the first thread
// appends to the history is read by all of them at the next node: `child_with` synchronises.
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
    Best best = join<WARPS>(scan_row(batch, row, spot, threadIdx.x, THREADS));
    if (failed(best)) break;
    int token = (int)(u32)best.best;
    if (row.temperature > 0)
      token = draw_alone({batch, row, spot, score_of(best.best)}, shared);
    if (row.logprobs >= 0) report_alone(batch, row, spot, from_sortable(best.raw), shared);
    ++count;
    if (threadIdx.x == 0) {
      path[count] = node;
      accept(batch, row, spot, token);
    }
    if (masked(row)) break;
    node = child_with(walk, r, node, token);
  }
  if (threadIdx.x) return;
  path[0] = count ? count : -1;
  fill(batch, r, count);
}
