
// The same by all blocks of a grid, in two launches; it comes behind draw.cuh and
// last_block.cuh. Grid x has the blocks of a spot, whose warps take its units by turns. The first
// launch (`weigh`) counts the tokens of each bin of the score and sums their weights; the last
// block finds the bins in which a filter ends. The second (`pick`) sums the weights of every unit
// in the bins before, and lists the tokens of these bins; the last block sorts them and draws.
// Without a filter the first launch draws.

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
  u64* ranges;  // [spots, units]: kept weight by unit
  int first;    // the first spot of this launch
};

__device__ int units_of(int n) { return (n + UNIT - 1) / UNIT; }
__device__ Work& work_of(const Wide& wide, int job) { return wide.works[2 * blockIdx.y + job]; }
__device__ u64* ranges_of(const Wide& wide, int n) {
  return wide.ranges + (long long)blockIdx.y * units_of(n);
}

// Calls `each` with the units of this warp.
template <class Each>
__device__ void for_units(int n, const Each& each) {
  int warps = gridDim.x * WARPS, units = units_of(n);
  for (int i = blockIdx.x * WARPS + threadIdx.x / 32; i < units; i += warps) each(i);
}

__device__ int id_in_unit(int unit, int i) { return unit * UNIT + i * 32 + threadIdx.x % 32; }

// Count this block's tokens by bins, with their weights where `weighs`.
template <class Source>
__device__ void tally(const Source& source, int n, int width, bool weighs, Work& work,
                      Shared& shared) {
  clear(shared);
  for_units(n, [&](int unit) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int id = id_in_unit(unit, i), bin = BINS;
      u64 rank, mass = 0;
      if (id < n) {
        float relative = source(id, &rank);
        bin = bin_of(relative, width);
        if (weighs) mass = weight_of(relative);
      }
      add_to_bin(shared, bin < BINS, bin, mass);
    }
  });
  __syncthreads();
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
    u32 tokens = shared.tally[0][bin];
    if (!tokens) continue;
    atomicAdd(&work.counts[bin], tokens);
    u64 mass = mass_of(shared, bin);
    if (mass) atomicAdd(&work.masses[bin], mass);
  }
}

// Bins where top-k (0: none) and top-p end, by one block.
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
    // The part of the last bin that top-k keeps is not known yet: top-p ends between these two.
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

// Inversion in the order of ids: by units, whose weights are known, then within the one that is
// hit, by every warp.
__device__ int invert(const Tempered& source, u64 limit, const u64* ranges, Shared& shared) {
  int n = source.batch.vocab, units = units_of(n), each = (units + THREADS - 1) / THREADS;
  int first = min((int)threadIdx.x * each, units), end = min(first + each, units);
  u64 mass = 0, total;
  for (int i = first; i < end; ++i) mass += __ldcg(ranges + i);
  u64 before = sum_before(mass, shared, &total);
  u64 target = target_of(source.row, source.spot, total);
  if (before <= target && target < before + mass) {
    int unit = first;
    u64 part;
    while (unit < end - 1 && target >= before + (part = __ldcg(ranges + unit)))
      before += part, ++unit;
    shared.places[0] = {target - before, unit};
  }
  __syncthreads();
  Place hit = shared.places[0];
  int lane = threadIdx.x % 32, id = hit.at * UNIT + EACH * lane, found = -1;
  u64 masses[EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    sum += masses[i] = id + i < n ? kept_mass(source, id + i, limit) : 0;
  before = sum;
  for (int i = 1; i < 32; i <<= 1) {
    u64 other = __shfl_up_sync(~0u, before, i);
    if (lane >= i) before += other;
  }
  before -= sum;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (before <= hit.left && hit.left < before + masses[i]) found = id + i;
    before += masses[i];
  }
  return __shfl_sync(~0u, found, __ffs(__ballot_sync(~0u, found >= 0)) - 1);
}

// The token of a row without filters, in the block that comes last; -1 in all others.
__device__ int weigh(const Tempered& source, const Wide& wide, Shared& shared) {
  const Row& row = source.row;
  int n = source.batch.vocab;
  Work& work = work_of(wide, 0);
  u64* ranges = ranges_of(wide, n);
  bool filtered = row.top_k || row.top_p < 1;
  if (filtered)
    tally(source, n, FINE, row.top_p < 1, work, shared);
  else
    for_units(n, [&](int unit) {
      u64 mass = 0;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        int id = id_in_unit(unit, i);
        if (id < n) mass += kept_mass(source, id, NEVER);
      }
      mass = warp_sum(mass);
      if (threadIdx.x % 32 == 0) ranges[unit] = mass;
    });
  if (!is_last_block(&work.done, gridDim.x)) return -1;
  if (!filtered) return invert(source, NEVER, ranges, shared);
  find_edge(work, row.top_k, row.top_p, shared);
  return -1;
}

// The token of a row with filters, in the block that comes last; -1 in all others.
__device__ int pick(const Tempered& source, const Wide& wide, Shared& shared) {
  const Row& row = source.row;
  if (!(row.top_k || row.top_p < 1)) return -1;
  int n = source.batch.vocab;
  Work& work = work_of(wide, 0);
  Edge edge = work.edge;
  u64* ranges = ranges_of(wide, n);
  for_units(n, [&](int unit) {
    u64 mass = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int id = id_in_unit(unit, i), bin = BINS;
      u64 rank = NEVER;
      float relative = 0;
      if (id < n) {
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
    if (__any_sync(~0u, mass != 0)) mass = warp_sum(mass);
    if (threadIdx.x % 32 == 0) ranges[unit] = mass;
  });
  if (!is_last_block(&work.done, gridDim.x)) return -1;
  u32 size = take_list(work, shared);
  if (size > LISTED) return draw_alone(source, shared);
  u64 limit = last_kept(row, edge, size, shared);
  for (u32 i = threadIdx.x; i < size; i += THREADS) {
    u64 rank = shared.list[i];
    float weight = expf(score_of(rank));
    if (rank <= limit && weight >= row.min_p) atomicAdd(ranges + (u32)rank / UNIT, fixed(weight));
  }
  __syncthreads();
  return invert(source, limit, ranges, shared);
}

// Log probabilities: the sum of all weights of the raw logits, and the best of these.
__device__ void weigh_raw(const Batch& batch, const Row& row, const Raw& source, const Wide& wide,
                          Shared& shared) {
  Work& work = work_of(wide, 1);
  int n = batch.vocab, count = reported(batch, row);
  u64 mass = 0, total;
  for_units(n, [&](int unit) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int id = id_in_unit(unit, i);
      u64 rank;
      if (id < n) mass += weight_of(source(id, &rank));
    }
  });
  sum_before(mass, shared, &total);
  if (threadIdx.x == 0 && total) atomicAdd(&work.mass, total);
  if (count) tally(source, n, COARSE, false, work, shared);
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
  int n = batch.vocab, count = reported(batch, row), edge = work.edge.k_bin;
  if (count <= 0) return;
  for_units(n, [&](int unit) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int id = id_in_unit(unit, i);
      u64 rank = NEVER;
      bool wanted = id < n && bin_of(source(id, &rank), COARSE) <= edge;
      enlist(work, wanted && edge < BINS, rank);
    }
  });
  if (!is_last_block(&work.done, gridDim.x)) return;
  u32 size = take_list(work, shared);
  if (edge == BINS || size > LISTED)
    list_alone(source, n, count, shared);
  else
    report_best(source.spot.result, count, shared);
}
