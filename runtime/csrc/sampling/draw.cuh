// Filters, the draw and log probabilities of one spot, by one block of THREADS; it comes behind
// rows.cuh. It needs a pass over the logits for every step of the way.

#define THREADS 512
// Resident blocks of a multiprocessor.
#define RESIDENT 2
#define WARPS (THREADS / 32)
#define BINS 2048
#define LISTED 2048
// A warp takes this many ids at a time, EACH a lane.
#define EACH 4
#define UNIT (32 * EACH)
// Most tokens that the bins of a block can count.
#define MOST_COUNTED (1 << 18)

struct Place {
  u64 left;
  int at;
};

struct Shared {
  union {
    u64 list[LISTED];
    u32 tally[4][BINS];  // tokens, and their weights by digits of 14 bits
  };
  u64 warps[WARPS];
  u64 sums[4];
  Place places[2];
  u32 listed;
};

// The sum over the threads before this one; `total` over all.
__device__ u64 sum_before(u64 value, Shared& shared, u64* total) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 sum = value;
  for (int i = 1; i < 32; i <<= 1) {
    u64 other = __shfl_up_sync(~0u, sum, i);
    if (lane >= i) sum += other;
  }
  __syncthreads();
  if (lane == 31) shared.warps[warp] = sum;
  __syncthreads();
  u64 before = 0, all = 0;
  for (int i = 0; i < WARPS; ++i) {
    if (i == warp) before = all;
    all += shared.warps[i];
  }
  *total = all;
  return before + sum - value;
}

// Among N values a thread, of which those before have the sum `before`: the place where the sum
// reaches `wanted`, and what of it is left there. At most one thread has it.
template <int N>
__device__ void mark(const u64 (&values)[N], u64 before, u64 wanted, Place& place) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (before < wanted && wanted <= before + values[i])
      place = {wanted - before, N * (int)threadIdx.x + i};
    before += values[i];
  }
}

// Least sum of which `share` of `total` is kept; at least 1.
__device__ u64 goal_of(double share, u64 total) {
  return max(min((u64)ceil(share * (double)total), total), 1ull);
}

// Source of the ranking: the tempered scores, or the raw logits.
struct Tempered {
  const Batch& batch;
  const Row& row;
  const Spot& spot;
  float highest;
  __device__ float operator()(int id, u64* rank) const {
    float x = __ldg(spot.logits + id);
    float relative = (adjusted(batch, row, spot, x, id) - highest) / row.temperature;
    *rank = rank_of(relative, id);
    return relative;
  }
};

struct Raw {
  const Spot& spot;
  float highest;
  __device__ float operator()(int id, u64* rank) const {
    float x = __ldg(spot.logits + id);
    *rank = rank_of(x, id);
    return x - highest;
  }
};

// The bin of a distance from the highest score, in the order of distances: bins are equally wide
// up to 1/8 and then a 256th (FINE) or 128th (COARSE) of an octave. Those from BINS on are further
// away than 31.8, where every weight is 0, or 8191.
#define FINE 15
#define COARSE 16

__device__ int bin_of(float relative, int width) {
  return (__float_as_int(0.125f - relative) - __float_as_int(0.125f)) >> width;
}

__device__ int bin_below(float relative) { return min(bin_of(relative, FINE), BINS - 1); }

__device__ u64 weight_of(float relative) { return fixed(expf(relative)); }

__device__ u64 warp_sum(u64 value) {
  for (int i = 16; i; i >>= 1) value += __shfl_xor_sync(~0u, value, i);
  return value;
}

__device__ void clear(Shared& shared) {
  __syncthreads();
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS)
    for (int i = 0; i < 4; ++i) shared.tally[i][bin] = 0;
  __syncthreads();
}

// A token of every lane that has one; all lanes of a warp come here.
__device__ void add_to_bin(Shared& shared, bool counts, int bin, u64 mass) {
  u32 who = __ballot_sync(~0u, counts), tokens = 1;
  if (!who) return;
  // Equal bins, as in a flat distribution, would queue up.
  int first = __shfl_sync(~0u, bin, __ffs(who) - 1);
  if (__all_sync(~0u, !counts || bin == first)) {
    mass = warp_sum(counts ? mass : 0);
    tokens = __popc(who);
    counts = threadIdx.x % 32 == __ffs(who) - 1;
  }
  if (!counts) return;
  atomicAdd(&shared.tally[0][bin], tokens);
  u32 low = (u32)mass & 0x3FFF, middle = (u32)(mass >> 14) & 0x3FFF, high = (u32)(mass >> 28);
  if (low) atomicAdd(&shared.tally[1][bin], low);
  if (middle) atomicAdd(&shared.tally[2][bin], middle);
  if (high) atomicAdd(&shared.tally[3][bin], high);
}

__device__ u64 mass_of(const Shared& shared, int bin) {
  return shared.tally[1][bin] + ((u64)shared.tally[2][bin] << 14) +
         ((u64)shared.tally[3][bin] << 28);
}

// Weights of the tokens of this block that `digit` has a bin for (not below 0), or their number: by
// bin, BINS / THREADS a thread.
template <class Digit>
__device__ void sum_bins(int n, bool weighs, u64 (&sums)[BINS / THREADS], Shared& shared,
                         const Digit& digit) {
  for (int i = 0; i < BINS / THREADS; ++i) sums[i] = 0;
  for (int begin = 0; begin < n; begin += MOST_COUNTED) {
    clear(shared);
    for (int i = begin; i < min(begin + MOST_COUNTED, n); i += THREADS) {
      int id = i + threadIdx.x, bin = -1;
      u64 mass = 0;
      if (id < n) bin = digit(id, &mass);
      add_to_bin(shared, bin >= 0, bin, weighs ? mass : 0);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BINS / THREADS; ++i) {
      int bin = BINS / THREADS * threadIdx.x + i;
      sums[i] += weighs ? mass_of(shared, bin) : shared.tally[0][bin];
    }
  }
}

// The bin in which the sum reaches `wanted` or a share of it, and what of it is left in that bin.
__device__ int find_bin(const u64 (&sums)[BINS / THREADS], u64* wanted, double share,
                        Shared& shared) {
  u64 sum = 0, total;
  for (int i = 0; i < BINS / THREADS; ++i) sum += sums[i];
  u64 before = sum_before(sum, shared, &total);
  mark(sums, before, share > 0 ? goal_of(share, total) : min(*wanted, total), shared.places[0]);
  __syncthreads();
  *wanted = shared.places[0].left;
  return shared.places[0].at;
}

// Sort the first `size` of the list (bitonic: Batcher 1968), padded to a power of two.
__device__ void sort_list(Shared& shared, u32 size) {
  u32 padded = 2;
  while (padded < size) padded <<= 1;
  for (u32 i = size + threadIdx.x; i < padded; i += THREADS) shared.list[i] = NEVER;
  for (u32 span = 2; span <= padded; span <<= 1)
    for (u32 step = span >> 1; step; step >>= 1) {
      __syncthreads();
      for (u32 i = threadIdx.x; i < padded / 2; i += THREADS) {
        u32 low = 2 * i - (i & (step - 1)), high = low + step;
        u64 a = shared.list[low], b = shared.list[high];
        if ((a > b) == !(low & span)) shared.list[low] = b, shared.list[high] = a;
      }
    }
  __syncthreads();
}

// The rank of the sorted list at which the sum of the weights reaches `wanted`.
__device__ u64 pick_heavy(Shared& shared, u32 size, u64 wanted) {
  const int each = LISTED / THREADS;
  u64 values[each], sum = 0, total;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    u32 place = each * threadIdx.x + i;
    sum += values[i] = place < size ? weight_of(score_of(shared.list[place])) : 0;
  }
  mark(values, sum_before(sum, shared, &total), wanted, shared.places[0]);
  __syncthreads();
  return shared.list[shared.places[0].at];
}

// The rank of the `wanted`th token, or where the `share` of the weight of all ranks up to `limit` is
// reached: first by bins of the score, then by digits of the rank until
// the candidates fit into a list, which is sorted.
template <class Source>
__device__ u64 select(const Source& source, int n, u64 limit, u64 wanted, double share,
                      Shared& shared) {
  bool weighs = share > 0;
  u64 sums[BINS / THREADS], rank, prefix = 0;
  sum_bins(n, weighs, sums, shared, [&](int id, u64* mass) {
    u64 rank;
    float relative = source(id, &rank);
    *mass = weight_of(relative);
    return rank <= limit ? bin_below(relative) : -1;
  });
  int bin = find_bin(sums, &wanted, share, shared);
  for (int shift = 64;;) {
    auto belongs = [&](float relative, u64 rank) {
      return rank <= limit && bin_below(relative) == bin &&
             (shift == 64 || rank >> shift == prefix);
    };
    __syncthreads();
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
      float relative = source(i, &rank);
      if (!belongs(relative, rank)) continue;
      u32 place = atomicAdd(&shared.listed, 1u);
      if (place < LISTED) shared.list[place] = rank;
    }
    __syncthreads();
    u32 size = shared.listed;
    if (size <= LISTED) {
      sort_list(shared, size);
      return weighs ? pick_heavy(shared, size, wanted) : shared.list[min(wanted, (u64)size) - 1];
    }
    int next = max(shift - 11, 0);
    sum_bins(n, weighs, sums, shared, [&](int id, u64* mass) {
      u64 rank;
      float relative = source(id, &rank);
      *mass = weight_of(relative);
      return belongs(relative, rank) ? (int)(rank >> next & ((1ull << (shift - next)) - 1)) : -1;
    });
    u64 digit = find_bin(sums, &wanted, 0, shared);
    prefix = shift < 64 ? prefix << (shift - next) | digit : digit;
    shift = next;
  }
}

// Philox4x32-10 (Salmon et al., SC 2011): 53 bits for one position, the counter's low words.
__device__ u64 random_bits(u64 seed, u64 position) {
  u32 c0 = (u32)position, c1 = (u32)(position >> 32), c2 = 0, c3 = 0;
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  for (int i = 0; i < 10; ++i) {
    u32 h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
    u32 h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return (u64)(c0 >> 5) << 26 | c1 >> 6;
}

// Place of the random number in the kept weights: a cumulative integer exceeds
// uniform * total exactly when it exceeds the floor of that.
__device__ u64 target_of(const Row& row, const Spot& spot, u64 total) {
  return __umul64hi(random_bits(row.seed, spot.position) << 11, total);
}

__device__ u64 kept_mass(const Tempered& source, int id, u64 limit) {
  u64 rank;
  float weight = expf(source(id, &rank));
  return rank <= limit && weight >= source.row.min_p ? fixed(weight) : 0;
}

// Inversion in the order of ids: every warp sums a range, the range that is hit is split again.
__device__ int invert_alone(const Tempered& source, int n, u64 limit, Shared& shared) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, span = (n + WARPS - 1) / WARPS;
  u64 mass = 0, total;
  for (int i = warp * span + lane; i < min((warp + 1) * span, n); i += 32)
    mass += kept_mass(source, i, limit);
  sum_before(mass, shared, &total);
  u64 target = target_of(source.row, source.spot, total);
  int range = 0;
  while (range < WARPS - 1 && target >= shared.warps[range]) target -= shared.warps[range++];
  int each = (span + THREADS - 1) / THREADS;
  int first = range * span + threadIdx.x * each;
  int end = min(min(first + each, (range + 1) * span), n);
  mass = 0;
  for (int i = first; i < end; ++i) mass += kept_mass(source, i, limit);
  u64 before = sum_before(mass, shared, &total);
  if (before <= target && target < before + mass) {
    for (int i = first; i < end; ++i) {
      u64 part = kept_mass(source, i, limit);
      if (target < before + part) {
        shared.places[0].at = i;
        break;
      }
      before += part;
    }
  }
  __syncthreads();
  return shared.places[0].at;
}

__device__ int draw_alone(const Tempered& source, Shared& shared) {
  int n = source.batch.vocab;
  const Row& row = source.row;
  u64 limit = NEVER;
  if (row.top_k) limit = select(source, n, limit, (u64)row.top_k, 0, shared);
  if (row.top_p < 1) limit = select(source, n, limit, 0, row.top_p, shared);
  return invert_alone(source, n, limit, shared);
}

// The best of the raw logits, ranked, from the first of a list.
__device__ void report_best(Result* result, int count, Shared& shared) {
  if (threadIdx.x >= count) return;
  result->ids[threadIdx.x] = (int)(u32)shared.list[threadIdx.x];
  result->logits[threadIdx.x] = score_of(shared.list[threadIdx.x]);
}

__device__ int reported(const Batch& batch, const Row& row) {
  return min(row.logprobs, min(batch.vocab, TOP));
}

__device__ void list_alone(const Raw& source, int n, int count, Shared& shared) {
  u64 limit = select(source, n, NEVER, (u64)count, 0, shared), rank;
  __syncthreads();
  if (threadIdx.x == 0) shared.listed = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += THREADS) {
    source(i, &rank);
    if (rank <= limit) shared.list[atomicAdd(&shared.listed, 1u)] = rank;
  }
  __syncthreads();
  sort_list(shared, (u32)count);
  report_best(source.spot.result, count, shared);
}

__device__ void report_alone(const Batch& batch, const Row& row, const Spot& spot, float highest,
                             Shared& shared) {
  Raw source = {spot, highest};
  int count = reported(batch, row);
  u64 rank, mass = 0;
  for (int i = threadIdx.x; i < batch.vocab; i += THREADS)
    mass += weight_of(source(i, &rank));
  sum_before(mass, shared, &mass);
  if (threadIdx.x == 0) {
    spot.result->mass = mass;
    spot.result->highest = highest;
  }
  if (count) list_alone(source, batch.vocab, count, shared);
}
