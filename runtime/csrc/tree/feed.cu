#include "step/steps.cuh"
// The step of a token tree: embeddings, positions, masks and the selected tokens, as
// runtime/device/tree_arrays.py specifies them.

#define NODES 1024

struct Nodes {
  int* ids;  // [rows, steps]
  const int* parents;
  const INDEX* lengths;  // the position of a node without ancestors
  int first;     // of the nodes that are selected
  int selected;  // how many they are
  int rooted;    // node 0 takes the row's newest token
};

// Ancestors and the node itself as bits; how many ancestors, or -1 where there is no node.
__device__ int see(const int* parents, int node, unsigned* seen) {
  if (parents[node] < -1) return -1;
  int depth = -1;
  // A parent comes before its child; a tree that was never written must not be followed in circles.
  for (int i = node, before; i >= 0; i = before < i ? before : -1, ++depth) {
    seen[i / 32] |= 1u << (i % 32);
    before = parents[i];
  }
  return depth;
}

// One block a node.
extern "C" __global__ void feed_nodes(Feed feed, Nodes nodes) {
  __shared__ int parents[NODES];
  __shared__ unsigned seen[NODES / 32];
  let_next_begin();
  int place = blockIdx.x;
  int row = place / feed.steps, node = place % feed.steps;
  long long first = (long long)row * feed.steps;
  for (int i = threadIdx.x; i <= node; i += blockDim.x) parents[i] = nodes.parents[first + i];
  for (int i = threadIdx.x; i < NODES / 32; i += blockDim.x) seen[i] = 0;
  __syncthreads();
  // Absent nodes are masked, and must be finite all the same.
  int token = parents[node] < -1 ? 0 : nodes.ids[first + node];
  if (nodes.rooted && node == 0) token = feed.next_tokens[row];
  if (threadIdx.x == 0) {
    int depth = see(parents, node, seen);
    feed.positions[place] = depth < 0 ? 0 : nodes.lengths[row] + (INDEX)depth;
    int chosen = node - nodes.first;
    if (chosen >= 0 && chosen < nodes.selected)
      feed.select[row * nodes.selected + chosen] = node;
    if (nodes.rooted && node == 0) nodes.ids[first] = token;
  }
  embed(feed, token, place);
  __syncthreads();
  int words = (feed.steps + 31) / 32;
  if (feed.packed)
    for (int i = threadIdx.x; i < words; i += blockDim.x)
      feed.packed[(long long)place * words + i] = seen[i];
  if (feed.mask)
    for (int i = threadIdx.x; i < feed.steps; i += blockDim.x)
      feed.mask[(long long)place * feed.steps + i] = seen[i / 32] >> (i % 32) & 1;
}
