// The same by all blocks of a grid, in two launches; it comes behind sampling_draw.cuh and
// last_block.cuh. A block has the TILE ids of its x. The first launch (`weigh`) counts the tokens
// of each bin of the score and sums their weights; its last block finds the bins in which a filter
// ends. The second (`pick`) sums the weights of every tile in the bins before, and lists the tokens
// of these bins; its last block sorts them and draws. Without a filter the first launch draws.

#define TILE (THREADS * EACH)

// Bins at which filters end: those before `first` are kept, those up to `last` and `k_bin` listed.
struct Edge {
  u64 mass_before_first;
  u64 mass_before_k;
  int first;
  int last;
  int k_bin;      // in which top-k ends; BINS where that changes nothing
  u32 k_left;     // how many of its tokens are kept
  u32 k_tokens;   // how many it has
};

// Counts, sums and numbers are 0 before and after the two launches.
struct Work {
  u32 counts[BINS];
  u64 masses[BINS];
  u64 list[LISTED];
  u64 mass;
  Edge edge;
  u32 listed;
  u32 done;
};

struct Wide {
  Work* works;  // [spots, 2]: for the draw and for log probabilities
  u64* ranges;  // [spots, tiles]: kept weight by tile
  int first;    // the first spot of this launch
};

__device__ Work& work_of(const Wide& wide, int job) { return wide.works[2 * blockIdx.y + job]; }
__device__ u64* ranges_of(const Wide& wide) {
  return wide.ranges + (long long)blockIdx.y * gridDim.x;
}

// The id of a thread's i-th token in the block's tile.
__device__ int id_in_tile(int i) { return blockIdx.x * TILE + i * THREADS + threadIdx.x; }

// Count this tile's tokens by bins, with their weights where `weighs`. A weight has 41 bits, which
// are summed as 20 and 21: a tile has less than 4,096 tokens.
template <class Source>
__device__ void tally(const Source& source, int n, int width, bool weighs, Work& work,
                      Shared& shared) {
  for (int i = threadIdx.x; i < 3 * BINS; i += THREADS) shared.tally[i] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int id = id_in_tile(i);
    if (id >= n) continue;
    u64 rank;
    float relative = source(id, &rank);
    int bin = bin_of(relative, width);
    if (bin >= BINS) continue;
    atomicAdd(&shared.tally[bin], 1u);
    if (!weighs) continue;
    u64 mass = weight_of(relative);
    atomicAdd(&shared.tally[BINS + bin], (u32)mass & 0xFFFFFu);
    atomicAdd(&shared.tally[2 * BINS + bin], (u32)(mass >> 20));
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
    u32 count = shared.tally[bin];
    if (!count) continue;
    atomicAdd(&work.counts[bin], count);
    u64 mass = shared.tally[BINS + bin] + ((u64)shared.tally[2 * BINS + bin] << 20);
    if (mass) atomicAdd(&work.masses[bin], mass);
  }
}

// Where top-k (0: none) and top-p end, by one block.
__device__ void find_edge(Work& work, u64 top_k, double top_p, Shared& shared) {
  const int each = BINS / THREADS;
  u64 counts[each], masses[each], count = 0, mass = 0, tokens, weight;
  bool weighs = top_p < 1;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    int bin = each * threadIdx.x + i;
    count += counts[i] = __ldcg(work.counts + bin);
    mass += masses[i] = weighs ? __ldcg(work.masses + bin) : 0;
    work.counts[bin] = 0;
    if (weighs) work.masses[bin] = 0;
  }
  u64 fewer = sum_before(count, shared, &tokens), lighter = sum_before(mass, shared, &weight);
  bool limited = top_k && top_k <= tokens;
  if (limited) mark(counts, fewer, top_k, shared.places[0]);
  __syncthreads();
  Edge edge = {};
  edge.k_bin = limited ? shared.places[0].at : BINS;
  edge.k_left = limited ? (u32)shared.places[0].left : 0;
  if (threadIdx.x == 0) shared.sums[0] = weight, shared.sums[1] = shared.sums[2] = 0;
  __syncthreads();
  u64 before = lighter;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    if (each * (int)threadIdx.x + i == edge.k_bin)
      shared.sums[0] = before, shared.sums[1] = masses[i], shared.sums[2] = counts[i];
    before += masses[i];
  }
  __syncthreads();
  edge.first = edge.last = edge.k_bin;
  edge.mass_before_k = shared.sums[0];
  edge.k_tokens = (u32)shared.sums[2];
  if (weighs) {
    // How much of the last bin top-k keeps is not known yet: top-p ends between these two.
    u64 least = goal_of(top_p, shared.sums[0]);
    u64 most = goal_of(top_p, shared.sums[0] + shared.sums[1]);
    mark(masses, lighter, least, shared.places[0]);
    mark(masses, lighter, most, shared.places[1]);
    __syncthreads();
    edge.first = shared.places[0].at;
    edge.last = shared.places[1].at;
    edge.mass_before_first = least - shared.places[0].left;
  }
  if (threadIdx.x == 0) work.edge = edge;
}

__device__ void enlist(Work& work, bool wanted, u64 rank) {
  u32 which = __ballot_sync(~0u, wanted);
  if (!which) return;
  int lane = threadIdx.x % 32;
  u32 place = 0;
  if (lane == 0) place = atomicAdd(&work.listed, (u32)__popc(which));
  place = __shfl_sync(~0u, place, 0) + __popc(which & ((1u << lane) - 1));
  if (wanted && place < LISTED) work.list[place] = rank;
}

// The list in its order, by the last block; it returns how many tokens were to be listed.
__device__ u32 take_list(Work& work, Shared& shared) {
  u32 size = __ldcg(&work.listed);
  __syncthreads();
  if (threadIdx.x == 0) work.listed = 0;
  if (size > LISTED) return size;
  for (u32 i = threadIdx.x; i < size; i += THREADS) shared.list[i] = __ldcg(work.list + i);
  sort_list(shared, size);
  return size;
}

// The last rank that the filters keep, from the sorted list.
__device__ u64 last_kept(const Row& row, const Edge& edge, u32 size, Shared& shared) {
  u32 k_first = size - edge.k_tokens, k_end = k_first + edge.k_left;
  if (!(row.top_p < 1)) return edge.k_bin < BINS ? shared.list[k_end - 1] : NEVER;
  const int each = LISTED / THREADS;
  u64 values[each], sum = 0, in_k = 0, total, kept;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    u32 place = each * threadIdx.x + i;
    sum += values[i] = place < size ? weight_of(score_of(shared.list[place])) : 0;
    if (place >= k_first && place < k_end) in_k += values[i];
  }
  sum_before(in_k, shared, &kept);
  u64 before = sum_before(sum, shared, &total);
  u64 goal = goal_of(row.top_p, edge.mass_before_k + kept) - edge.mass_before_first;
  mark(values, before, goal, shared.places[0]);
  __syncthreads();
  return shared.list[shared.places[0].at];
}

// Inversion in the order of ids: by tiles, whose weights are known, then within the one that is hit.
__device__ int invert(const Tempered& source, u64 limit, const u64* ranges, Shared& shared) {
  int each = (gridDim.x + THREADS - 1) / THREADS, first = threadIdx.x * each;
  int end = min(first + each, (int)gridDim.x);
  u64 mass = 0, total;
  for (int i = first; i < end; ++i) mass += __ldcg(ranges + i);
  u64 before = sum_before(mass, shared, &total);
  u64 target = target_of(source.row, source.spot, total);
  if (before <= target && target < before + mass) {
    for (int i = first; i < end; ++i) {
      u64 part = __ldcg(ranges + i);
      if (target < before + part) {
        shared.places[0] = {target - before, i};
        break;
      }
      before += part;
    }
  }
  __syncthreads();
  Place tile = shared.places[0];
  u64 values[EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int id = tile.at * TILE + EACH * threadIdx.x + i;
    sum += values[i] = id < source.batch.vocab ? kept_mass(source, id, limit) : 0;
  }
  mark(values, sum_before(sum, shared, &total), tile.left + 1, shared.places[1]);
  __syncthreads();
  return tile.at * TILE + shared.places[1].at;
}

// The token of a row without filters, in the block that comes last; -1 in all others.
__device__ int weigh(const Tempered& source, const Wide& wide, Shared& shared) {
  const Row& row = source.row;
  Work& work = work_of(wide, 0);
  bool filtered = row.top_k || row.top_p < 1;
  if (filtered) {
    tally(source, source.batch.vocab, FINE, row.top_p < 1, work, shared);
  } else {
    u64 mass = 0, total;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (id_in_tile(i) < source.batch.vocab) mass += kept_mass(source, id_in_tile(i), NEVER);
    sum_before(mass, shared, &total);
    if (threadIdx.x == 0) ranges_of(wide)[blockIdx.x] = total;
  }
  if (!is_last_block(&work.done, gridDim.x)) return -1;
  if (!filtered) return invert(source, NEVER, ranges_of(wide), shared);
  find_edge(work, row.top_k, row.top_p, shared);
  return -1;
}

// The token of a row with filters, in the block that comes last; -1 in all others.
__device__ int pick(const Tempered& source, const Wide& wide, Shared& shared) {
  const Row& row = source.row;
  if (!(row.top_k || row.top_p < 1)) return -1;
  Work& work = work_of(wide, 0);
  Edge edge = work.edge;
  u64* ranges = ranges_of(wide);
  u64 mass = 0, total;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int id = id_in_tile(i);
    u64 rank = NEVER;
    int bin = BINS;
    float relative = 0;
    if (id < source.batch.vocab) {
      relative = source(id, &rank);
      bin = bin_of(relative, FINE);
    }
    bool kept = bin < edge.first && bin < BINS;
    if (kept) {
      float weight = expf(relative);
      if (weight >= row.min_p) mass += fixed(weight);
    }
    enlist(work, !kept && bin < BINS && (bin <= edge.last || bin == edge.k_bin), rank);
  }
  sum_before(mass, shared, &total);
  if (threadIdx.x == 0) ranges[blockIdx.x] = total;
  if (!is_last_block(&work.done, gridDim.x)) return -1;
  u32 size = take_list(work, shared);
  if (size > LISTED) return draw_alone(source, shared);
  u64 limit = last_kept(row, edge, size, shared);
  for (u32 i = threadIdx.x; i < size; i += THREADS) {
    u64 rank = shared.list[i];
    float weight = expf(score_of(rank));
    if (rank <= limit && weight >= row.min_p) atomicAdd(ranges + (u32)rank / TILE, fixed(weight));
  }
  __syncthreads();
  return invert(source, limit, ranges, shared);
}

// Log probabilities: the sum of all weights of the raw logits, and the best of these.
__device__ void weigh_raw(const Batch& batch, const Row& row, const Raw& source, const Wide& wide,
                          Shared& shared) {
  Work& work = work_of(wide, 1);
  int count = reported(batch, row);
  u64 rank, mass = 0, total;
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (id_in_tile(i) < batch.vocab) mass += weight_of(source(id_in_tile(i), &rank));
  sum_before(mass, shared, &total);
  if (threadIdx.x == 0 && total) atomicAdd(&work.mass, total);
  if (count) tally(source, batch.vocab, COARSE, false, work, shared);
  if (!is_last_block(&work.done, gridDim.x)) return;
  if (threadIdx.x == 0) {
    source.spot.result->mass = atomicExch(&work.mass, 0ull);
    source.spot.result->highest = source.highest;
  }
  if (count) find_edge(work, count, 1, shared);
}

__device__ void pick_raw(const Batch& batch, const Row& row, const Raw& source, const Wide& wide,
                         Shared& shared) {
  Work& work = work_of(wide, 1);
  int count = reported(batch, row), edge = work.edge.k_bin;
  if (count <= 0) return;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int id = id_in_tile(i);
    u64 rank = NEVER;
    bool wanted = id < batch.vocab && bin_of(source(id, &rank), COARSE) <= edge;
    enlist(work, wanted && edge < BINS, rank);
  }
  if (!is_last_block(&work.done, gridDim.x)) return;
  u32 size = take_list(work, shared);
  if (edge == BINS || size > LISTED)
    list_alone(source, batch.vocab, count, shared);
  else
    report_best(source.spot.result, count, shared);
}
