#include "common/ranks.cuh"
#include "common/last_block.cuh"
// Token trees from the log-probabilities of a draft engine, specified by
// runtime/device/tree_arrays.py. K is `top_k`. Hidden states are copied as UNIT, and a block
// searches THREADS * EACH logits.

#define THREADS 256
#define WARPS (THREADS / 32)
#define ROWS 256
#define MOST_K 128
#define STAGED 320

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
  u32* done;                // [rows]: for is_last_block
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

struct Shared {
  u64 ranks[WARPS][MOST_K];  // K a warp, in the first places of a row
  u64 staged[WARPS][STAGED];
  int following[MOST_K];
};

__device__ float known(float x) { return x == x ? x : MINUS_INFINITY; }

__device__ u64 least_of_warp(u64 value) {
#if __CUDA_ARCH__ >= 800
  u32 high = value >> 32, least = __reduce_min_sync(~0u, high);
  u32 low = __reduce_min_sync(~0u, high == least ? (u32)value : ~0u);
  return (u64)least << 32 | low;
#else
  for (int i = 16; i; i >>= 1) value = min(value, __shfl_xor_sync(~0u, value, i));
  return value;
#endif
}

// The K least of EACH ranks a lane, in their order.
__device__ void find_least(u64 (&own)[EACH], int top_k, u64* found) {
#pragma unroll
  for (int i = 1; i < EACH; ++i)
#pragma unroll
    for (int j = i; j > 0; --j) {
      u64 low = min(own[j - 1], own[j]);
      own[j] = max(own[j - 1], own[j]);
      own[j - 1] = low;
    }
  for (int k = 0; k < top_k; ++k) {
    u64 best = least_of_warp(own[0]);
    if (threadIdx.x % 32 == 0) found[k] = best;
    // No two ranks are the same.
    if (own[0] != best) continue;
#pragma unroll
    for (int i = 1; i < EACH; ++i) own[i - 1] = own[i];
    own[EACH - 1] = NEVER;
  }
}

// The K best of this block's part of the logits, in their order.
__device__ void list_part(const Proposal& proposal, Shared& shared) {
  int k = proposal.top_k, first = blockIdx.x * THREADS * EACH + threadIdx.x;
  const float* logits = proposal.logits + (long long)blockIdx.y * proposal.vocab;
  u64 own[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int id = first + i * THREADS;
    own[i] = id < proposal.vocab ? rank_of(known(logits[id]), id) : NEVER;
  }
  find_least(own, k, shared.ranks[threadIdx.x / 32]);
  __syncthreads();
  u64* list = proposal.lists + ((long long)blockIdx.y * gridDim.x + blockIdx.x) * k;
  for (int i = threadIdx.x; i < WARPS * k; i += THREADS) {
    u64 rank = shared.ranks[i / k][i % k];
    int place = i % k;
    for (int warp = 0; warp < WARPS; ++warp)
      for (int j = 0; j < k && warp != i / k; ++j) {
        u64 other = shared.ranks[warp][j];
        // Where there is none, the first warp's comes first.
        if (other > rank || (other == rank && warp > i / k)) break;
        ++place;
      }
    if (place < k) list[place] = rank;
  }
}

// The K best of the lists of a row of logits, by one warp.
__device__ const u64* merge(const Proposal& proposal, Shared& shared, const u64* lists) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = proposal.top_k, taken = 0;
  int size = proposal.count * k;
  if (proposal.count == 1) return lists;
  // The result of the round before may still be read.
  __syncwarp();
  if (size <= STAGED) {
    for (int i = lane; i < size; i += 32) shared.staged[warp][i] = lists[i];
    lists = shared.staged[warp];
    __syncwarp();
  }
  lists += lane * k;
  u64 own = lane < proposal.count ? lists[0] : NEVER;
  for (int i = 0; i < k; ++i) {
    u64 best = least_of_warp(own);
    if (lane == 0) shared.ranks[warp][i] = best;
    if (own == best && own != NEVER) own = ++taken < k ? lists[taken] : NEVER;
  }
  __syncwarp();
  return shared.ranks[warp];
}

// Enter the K best tokens by one row of logits into the table, from entry `first` on; by one warp.
__device__ void enter(const Proposal& proposal, Shared& shared, int row, int logits, int first,
                      int parent) {
  const u64* lists = proposal.lists + (long long)logits * proposal.count * proposal.top_k;
  const u64* best = merge(proposal, shared, lists);
  long long table = (long long)row * proposal.size;
  float sum = parent ? proposal.table_scores[table + parent] : 0.0f;
  for (int i = threadIdx.x % 32; i < proposal.top_k; i += 32) {
    int id = (int)(u32)best[i];
    long long entry = table + first + i;
    proposal.table_ids[entry] = proposal.full_ids ? proposal.full_ids[id] : id;
    proposal.table_parents[entry] = parent;
    // At most 0, whatever the engine's rounding: the order of a tree's nodes rests on it.
    proposal.table_scores[entry] = sum + fminf(score_of(best[i]), 0.0f);
  }
}

__device__ void take_slot(const Proposal& proposal, int row, int slot, int parent, int entry) {
  long long place = (long long)row * proposal.slots + slot;
  proposal.ids[place] = proposal.table_ids[(long long)row * proposal.size + entry];
  proposal.parents[place] = parent;
  proposal.entries[place] = entry;
}

// Work that does not depend on the logits, by all blocks of a row.
__device__ void reset(const Proposal& proposal, int row) {
  int k = proposal.top_k, first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS;
  long long table = (long long)row * proposal.size, slots = (long long)row * proposal.slots;
  for (int i = first; i < proposal.size; i += stride) {
    if (i && i <= k) continue;
    proposal.table_ids[table + i] = 0;
    proposal.table_parents[table + i] = i ? 0 : -1;
    proposal.table_scores[table + i] = i ? MINUS_INFINITY : 0.0f;
  }
  for (int i = k + first; i < proposal.slots; i += stride) {
    proposal.ids[slots + i] = 0;
    proposal.parents[slots + i] = -2;
  }
  const unit* fresh = proposal.hidden_out + (long long)row * proposal.width;
  // Slots that are not there yet may hold what is not finite.
  for (int i = first; i < proposal.slots * proposal.width; i += stride)
    proposal.hidden[slots * proposal.width + i] =
        i < k * proposal.width ? fresh[i % proposal.width] : unit();
}

// Grid x has the parts of a row of logits, y these rows, as below. The last block of a row of the
// batch merges what all of them found.
extern "C" __global__ void __launch_bounds__(THREADS) begin_tree(Proposal proposal) {
  __shared__ Shared shared;
  int row = blockIdx.y;
  reset(proposal, row);
  list_part(proposal, shared);
  if (!is_last_block(proposal.done + row, gridDim.x)) return;
  if (threadIdx.x < 32) enter(proposal, shared, row, row, 1, 0);
  __syncthreads();
  for (int i = threadIdx.x; i < proposal.top_k; i += THREADS)
    take_slot(proposal, row, i, -1, 1 + i);
}

extern "C" __global__ void __launch_bounds__(THREADS) extend_tree(Proposal proposal) {
  __shared__ Shared shared;
  int k = proposal.top_k, row = blockIdx.y / k, start = proposal.level * k;
  int first = 1 + k + start * k;
  long long slots = (long long)row * proposal.slots;
  list_part(proposal, shared);
  if (!is_last_block(proposal.done + row, gridDim.x * k)) return;
  for (int i = threadIdx.x / 32; i < k; i += WARPS)
    enter(proposal, shared, row, row * k + i, first + i * k, proposal.entries[slots + start + i]);
  if (proposal.last) return;
  __syncthreads();
  const float* scores = proposal.table_scores + (long long)row * proposal.size + first;
  for (int i = threadIdx.x; i < k * k; i += THREADS) {
    float own = scores[i];
    int place = 0;
#pragma unroll 4
    for (int j = 0; j < k * k; ++j) place += scores[j] > own || (scores[j] == own && j < i);
    if (place >= k) continue;
    take_slot(proposal, row, start + k + place, start + i / k, first + i);
    shared.following[place] = i / k;
  }
  __syncthreads();
  const unit* fresh = proposal.hidden_out + (long long)row * k * proposal.width;
  unit* hidden = proposal.hidden + (slots + start + k) * proposal.width;
  for (int i = threadIdx.x; i < k * proposal.width; i += THREADS)
    hidden[i] = fresh[shared.following[i / proposal.width] * proposal.width + i % proposal.width];
}

struct Finish {
  int* ids;  // [rows, width]
  int* parents;
  int width;
  u32 speculating[ROWS / 32];
};

// A warp for each entry of a table, y has the rows: counts the entries before it and before its
// parent, which are the nodes of both.
extern "C" __global__ void __launch_bounds__(THREADS) finish_tree(Proposal proposal, Finish finish) {
  int row = blockIdx.y, entry = blockIdx.x * WARPS + threadIdx.x / 32, node = 0, above = 0;
  if (entry >= proposal.size) return;
  long long table = (long long)row * proposal.size;
  const float* scores = proposal.table_scores + table;
  int parent = max(proposal.table_parents[table + entry], 0);
  float own = scores[entry], its = scores[parent];
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < proposal.size; i += 32) {
    node += scores[i] > own || (scores[i] == own && i < entry);
    above += scores[i] > its || (scores[i] == its && i < parent);
  }
  for (int i = 16; i; i >>= 1) {
    node += __shfl_xor_sync(~0u, node, i);
    above += __shfl_xor_sync(~0u, above, i);
  }
  if (threadIdx.x % 32 || node >= finish.width) return;
  bool speculates = finish.speculating[row / 32] >> (row % 32) & 1;
  long long place = (long long)row * finish.width + node;
  finish.ids[place] = speculates ? proposal.table_ids[table + entry] : 0;
  finish.parents[place] = node == 0 ? -1 : speculates ? above : -2;
}
