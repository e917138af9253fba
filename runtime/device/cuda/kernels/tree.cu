#include "ranks.cuh"
// Token trees from the log-probabilities of a draft engine, specified by
// runtime/device/tree_arrays.py. K is `top_k`. Hidden states are copied as UNIT.

#define THREADS 1024
#define ROWS 256
#define MOST_K 128

typedef UNIT unit;

struct Proposal {
  const float* logits;  // [rows, 1 or K, vocab]
  const int* full_ids;  // [vocab], or null
  int* ids;             // [rows, slots]
  int* parents;
  int* entries;
  int* table_ids;  // [rows, size]
  int* table_parents;
  float* table_scores;
  u64* lists;               // [rows, 1 or K, count, K]: ranks of the best of each part of the logits
  const unit* hidden_out;   // [rows, 1 or K, width]
  unit* hidden;             // [rows, slots, width]
  int vocab;
  int slots;
  int size;
  int width;
  int top_k;
  int count;
  int level;
  int last;
};

__device__ float known(float x) { return x == x ? x : MINUS_INFINITY; }

__device__ u64 least_of_warp(u64 value) {
  for (int i = 16; i; i >>= 1) value = min(value, __shfl_xor_sync(~0u, value, i));
  return value;
}

// The best of this thread's logits whose rank is at least `bound`.
__device__ u64 least_from(const float* logits, int first, int end, u64 bound) {
  u64 best = NEVER;
#pragma unroll 4
  for (int i = first + threadIdx.x; i < end; i += blockDim.x) {
    u64 rank = rank_of(known(logits[i]), i);
    if (rank >= bound) best = min(best, rank);
  }
  return best;
}

// Grid x has the parts of a row, y the rows: the K best of each part, in their order.
extern "C" __global__ void __launch_bounds__(256) find_top(Proposal proposal, int span) {
  __shared__ u64 warps[2][8];
  const float* logits = proposal.logits + (long long)blockIdx.y * proposal.vocab;
  int first = blockIdx.x * span, end = min(first + span, proposal.vocab);
  u64* list =
      proposal.lists + ((long long)blockIdx.y * proposal.count + blockIdx.x) * proposal.top_k;
  u64 own = least_from(logits, first, end, 0);
  for (int k = 0; k < proposal.top_k; ++k) {
    u64 best = least_of_warp(own);
    // In turn: the other half may still be read.
    u64* half = warps[k & 1];
    if (threadIdx.x % 32 == 0) half[threadIdx.x / 32] = best;
    __syncthreads();
    for (int i = 0; i < 8; ++i) best = min(best, half[i]);
    if (threadIdx.x == 0) list[k] = best;
    // No two ranks are the same.
    if (own == best && best != NEVER) own = least_from(logits, first, end, best + 1);
  }
}

// Enter the K best tokens after an entry into the table, from entry `first` on; by one warp.
__device__ void enter(const Proposal& proposal, int row, const u64* lists, int first, int parent) {
  int lane = threadIdx.x % 32, taken = 0;
  long long table = (long long)row * proposal.size;
  float sum = proposal.table_scores[table + parent];
  for (int k = 0; k < proposal.top_k; ++k) {
    bool has = lane < proposal.count && taken < proposal.top_k;
    u64 own = has ? lists[(long long)lane * proposal.top_k + taken] : NEVER;
    u64 best = least_of_warp(own);
    if (own == best) ++taken;
    if (lane) continue;
    int id = (int)(u32)best;
    long long entry = table + first + k;
    proposal.table_ids[entry] = proposal.full_ids ? proposal.full_ids[id] : id;
    proposal.table_parents[entry] = parent;
    // At most 0, whatever the engine's rounding: the order of a tree's nodes rests on it.
    proposal.table_scores[entry] = sum + fminf(score_of(best), 0.0f);
  }
}

__device__ void take_slot(const Proposal& proposal, int row, int slot, int parent, int entry) {
  long long place = (long long)row * proposal.slots + slot;
  proposal.ids[place] = proposal.table_ids[(long long)row * proposal.size + entry];
  proposal.parents[place] = parent;
  proposal.entries[place] = entry;
}

// One block a row, as below.
extern "C" __global__ void __launch_bounds__(THREADS) begin_tree(Proposal proposal) {
  int row = blockIdx.x, k = proposal.top_k;
  long long table = (long long)row * proposal.size, slots = (long long)row * proposal.slots;
  for (int i = threadIdx.x; i < proposal.size; i += THREADS) {
    if (i && i <= k) continue;
    proposal.table_ids[table + i] = 0;
    proposal.table_parents[table + i] = i ? 0 : -1;
    proposal.table_scores[table + i] = i ? MINUS_INFINITY : 0.0f;
  }
  for (int i = k + threadIdx.x; i < proposal.slots; i += THREADS) {
    proposal.ids[slots + i] = 0;
    proposal.parents[slots + i] = -2;
  }
  __syncthreads();
  if (threadIdx.x < 32)
    enter(proposal, row, proposal.lists + (long long)row * proposal.count * k, 1, 0);
  __syncthreads();
  for (int i = threadIdx.x; i < k; i += THREADS) take_slot(proposal, row, i, -1, 1 + i);
  const unit* fresh = proposal.hidden_out + (long long)row * proposal.width;
  // What slots held that are not there yet may not be finite.
  for (int i = threadIdx.x; i < proposal.slots * proposal.width; i += THREADS)
    proposal.hidden[slots * proposal.width + i] =
        i < k * proposal.width ? fresh[i % proposal.width] : unit();
}

extern "C" __global__ void __launch_bounds__(THREADS) extend_tree(Proposal proposal) {
  __shared__ int following[MOST_K];
  int row = blockIdx.x, k = proposal.top_k, start = proposal.level * k;
  int first = 1 + k + start * k;
  long long slots = (long long)row * proposal.slots;
  for (int i = threadIdx.x / 32; i < k; i += THREADS / 32) {
    const u64* lists = proposal.lists + ((long long)row * k + i) * proposal.count * k;
    enter(proposal, row, lists, first + i * k, proposal.entries[slots + start + i]);
  }
  __syncthreads();
  if (proposal.last) return;
  const float* scores = proposal.table_scores + (long long)row * proposal.size + first;
  for (int i = threadIdx.x; i < k * k; i += THREADS) {
    u64 own = rank_of(scores[i], i);
    int place = 0;
    for (int j = 0; j < k * k; ++j) place += rank_of(scores[j], j) < own;
    if (place >= k) continue;
    take_slot(proposal, row, start + k + place, start + i / k, first + i);
    following[place] = i / k;
  }
  __syncthreads();
  const unit* fresh = proposal.hidden_out + (long long)row * k * proposal.width;
  unit* hidden = proposal.hidden + (slots + start + k) * proposal.width;
  for (int i = threadIdx.x; i < k * proposal.width; i += THREADS)
    hidden[i] = fresh[following[i / proposal.width] * proposal.width + i % proposal.width];
}

struct Finish {
  int* ids;  // [rows, width]
  int* parents;
  int* order;    // [rows, size]: the entries, the best first
  int* node_of;  // [rows, size]: the inverse
  u32* done;     // [rows]: blocks that have ended, 0 between launches
  int width;
  u32 speculating[ROWS / 32];
};

// Grid x has the parts of a table, y the rows: each thread ranks one entry by counting, and the
// last block of a row writes the tree.
extern "C" __global__ void __launch_bounds__(256) finish_tree(Proposal proposal, Finish finish) {
  __shared__ bool last;
  int row = blockIdx.y, size = proposal.size;
  long long table = (long long)row * size, tree = (long long)row * finish.width;
  const float* scores = proposal.table_scores + table;
  int entry = blockIdx.x * blockDim.x + threadIdx.x;
  if (entry < size) {
    u64 own = rank_of(scores[entry], entry);
    int place = 0;
    for (int i = 0; i < size; ++i) place += rank_of(scores[i], i) < own;
    finish.order[table + place] = entry;
    finish.node_of[table + entry] = place;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(finish.done + row, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) finish.done[row] = 0;
  bool speculates = finish.speculating[row / 32] >> (row % 32) & 1;
  for (int i = threadIdx.x; i < finish.width; i += blockDim.x) {
    // Written by other blocks: past this multiprocessor's own cache.
    int best = __ldcg(finish.order + table + i);
    finish.ids[tree + i] = speculates ? proposal.table_ids[table + best] : 0;
    int parent = -2;
    if (i == 0) parent = -1;
    else if (speculates)
      parent = __ldcg(finish.node_of + table + proposal.table_parents[table + best]);
    finish.parents[tree + i] = parent;
  }
}

// One block for each of the rows of `out` [rows, n, width]; `source` is [rows, pitch, width].
extern "C" __global__ void gather_rows(const unit* source, unit* out, const int* index, int n,
                                       int pitch, int width) {
  long long place = blockIdx.x, row = place / n;
  int from = index[place];
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    out[place * width + i] = from < 0 ? unit() : source[(row * pitch + from) * width + i];
}
