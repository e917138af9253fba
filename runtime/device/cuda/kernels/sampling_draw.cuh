// Filters, the draw and log probabilities of one node, by one block of THREADS; it comes behind
// sampling_rows.cuh.

#define THREADS 1024
#define BINS 2048
#define LISTED 2048

struct Shared {
  u64 bins[BINS];
  u64 list[LISTED];
  u64 warps[32];
  u64 found[3];
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
  for (int i = 0; i < 32; ++i) {
    if (i == warp) before = all;
    all += shared.warps[i];
  }
  *total = all;
  return before + sum - value;
}

// Where a token is picked: a row's logits, the token's position, and where to report.
struct Spot {
  int r;
  const float* logits;
  u64 position;
  Result* result;
};

// What is ranked: the tempered scores, or the raw logits.
struct Tempered {
  const Batch& batch;
  const Row& row;
  const Spot& spot;
  float highest;
  __device__ float operator()(int id, u64* rank) const {
    float x = spot.logits[id];
    float relative = (adjusted(batch, row, spot.r, x, id) - highest) / row.temperature;
    *rank = rank_of(relative, id);
    return relative;
  }
};

struct Raw {
  const Spot& spot;
  float highest;
  __device__ float operator()(int id, u64* rank) const {
    float x = spot.logits[id];
    *rank = rank_of(x, id);
    return x - highest;
  }
};

// 32 bins to a unit of distance from the highest score; the last has all the rest.
__device__ int bin_of(float relative) { return (int)fminf(relative * -32.0f, BINS - 1.0f); }

template <bool MASS>
__device__ u64 measure(float relative) {
  return MASS ? fixed(expf(relative)) : 1;
}

__device__ void clear(Shared& shared) {
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += THREADS) shared.bins[i] = 0;
  __syncthreads();
}

// The bin in which the sum over `bins` reaches `wanted`, and what of it is left in that bin.
__device__ int find_bin(Shared& shared, u64* wanted, double share) {
  __syncthreads();
  u64 low = shared.bins[2 * threadIdx.x], high = shared.bins[2 * threadIdx.x + 1], total;
  u64 before = sum_before(low + high, shared, &total);
  u64 goal = *wanted;
  if (share > 0) goal = max((u64)ceil(share * (double)total), 1ull);
  goal = min(goal, total);
  if (before < goal && goal <= before + low) {
    shared.found[0] = 2 * threadIdx.x;
    shared.found[1] = goal - before;
  } else if (before + low < goal && goal <= before + low + high) {
    shared.found[0] = 2 * threadIdx.x + 1;
    shared.found[1] = goal - before - low;
  }
  __syncthreads();
  *wanted = shared.found[1];
  return (int)shared.found[0];
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

// The first rank of the sorted list at which the sum reaches `wanted`.
template <bool MASS>
__device__ u64 pick_listed(Shared& shared, u32 size, u64 wanted) {
  if (!MASS) return shared.list[min(wanted, (u64)size) - 1];
  u32 i = 2 * threadIdx.x;
  u64 low = i < size ? measure<MASS>(score_of(shared.list[i])) : 0;
  u64 high = i + 1 < size ? measure<MASS>(score_of(shared.list[i + 1])) : 0;
  u64 total, before = sum_before(low + high, shared, &total);
  wanted = min(wanted, total);
  if (threadIdx.x == 0) shared.found[2] = shared.list[0];
  __syncthreads();
  if (before < wanted && wanted <= before + low) shared.found[2] = shared.list[i];
  else if (before + low < wanted && wanted <= before + low + high)
    shared.found[2] = shared.list[i + 1];
  __syncthreads();
  return shared.found[2];
}

// The rank at which the measure of all ranks up to it reaches `wanted`, or the `share` of the
// measure of all ranks up to `limit`: first by bins of the score, then by digits of the rank until
// the candidates fit into a list, which is sorted.
template <bool MASS, class Source>
__device__ u64 select(const Source& source, int n, u64 limit, u64 wanted, double share,
                      Shared& shared) {
  u64 rank;
  clear(shared);
  for (int i = threadIdx.x; i < n; i += THREADS) {
    float relative = source(i, &rank);
    if (rank <= limit) atomicAdd(&shared.bins[bin_of(relative)], measure<MASS>(relative));
  }
  int bin = find_bin(shared, &wanted, share);
  u64 prefix = 0;
  for (int shift = 64;;) {
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
      float relative = source(i, &rank);
      if (rank > limit || bin_of(relative) != bin) continue;
      if (shift < 64 && rank >> shift != prefix) continue;
      u32 place = atomicAdd(&shared.listed, 1u);
      if (place < LISTED) shared.list[place] = rank;
    }
    __syncthreads();
    u32 size = shared.listed;
    if (size <= LISTED) {
      sort_list(shared, size);
      return pick_listed<MASS>(shared, size, wanted);
    }
    int next = max(shift - 11, 0);
    clear(shared);
    for (int i = threadIdx.x; i < n; i += THREADS) {
      float relative = source(i, &rank);
      if (rank > limit || bin_of(relative) != bin) continue;
      if (shift < 64 && rank >> shift != prefix) continue;
      u32 digit = (rank >> next) & ((1u << (shift - next)) - 1);
      atomicAdd(&shared.bins[digit], measure<MASS>(relative));
    }
    u64 digit = find_bin(shared, &wanted, 0);
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

template <class Source>
__device__ u64 kept_mass(const Source& source, int id, u64 limit, float min_p) {
  u64 rank;
  float weight = expf(source(id, &rank));
  return rank <= limit && weight >= min_p ? fixed(weight) : 0;
}

// Inversion in the order of ids: every warp sums a range, the range that is hit is split again.
template <class Source>
__device__ int invert(const Source& source, int n, u64 limit, float min_p, u64 bits,
                      Shared& shared) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, span = (n + 31) / 32;
  u64 mass = 0, total;
  for (int i = warp * span + lane; i < min((warp + 1) * span, n); i += 32)
    mass += kept_mass(source, i, limit, min_p);
  sum_before(mass, shared, &total);
  // A cumulative integer exceeds uniform * total exactly when it exceeds the floor of that.
  u64 target = __umul64hi(bits << 11, total);
  int range = 0;
  while (range < 31 && target >= shared.warps[range]) target -= shared.warps[range++];
  int each = (span + THREADS - 1) / THREADS;
  int first = range * span + threadIdx.x * each;
  int end = min(min(first + each, (range + 1) * span), n);
  mass = 0;
  for (int i = first; i < end; ++i) mass += kept_mass(source, i, limit, min_p);
  u64 before = sum_before(mass, shared, &total);
  if (before <= target && target < before + mass) {
    for (int i = first; i < end; ++i) {
      u64 part = kept_mass(source, i, limit, min_p);
      if (target < before + part) {
        shared.found[0] = i;
        break;
      }
      before += part;
    }
  }
  __syncthreads();
  return (int)shared.found[0];
}

__device__ int draw(const Batch& batch, const Row& row, const Spot& spot, float highest,
                    Shared& shared) {
  Tempered source = {batch, row, spot, highest};
  u64 limit = NEVER;
  if (row.top_k)
    limit = select<false>(source, batch.vocab, limit, (u64)row.top_k, 0, shared);
  if (row.top_p < 1) limit = select<true>(source, batch.vocab, limit, 0, row.top_p, shared);
  u64 bits = random_bits(row.seed, spot.position);
  return invert(source, batch.vocab, limit, row.min_p, bits, shared);
}

__device__ void report(const Batch& batch, const Row& row, const Spot& spot, float highest,
                       int token, Shared& shared) {
  Raw source = {spot, highest};
  Result* result = spot.result;
  int count = min(row.logprobs, min(batch.vocab, TOP));
  u64 limit = 0, rank, mass = 0;
  if (count) limit = select<false>(source, batch.vocab, NEVER, (u64)count, 0, shared);
  __syncthreads();
  if (threadIdx.x == 0) shared.listed = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < batch.vocab; i += THREADS) {
    mass += fixed(expf(source(i, &rank)));
    if (count && rank <= limit) shared.list[atomicAdd(&shared.listed, 1u)] = rank;
  }
  sum_before(mass, shared, &mass);
  if (count) sort_list(shared, (u32)count);
  if (threadIdx.x < count) {
    result->ids[threadIdx.x] = (int)(u32)shared.list[threadIdx.x];
    result->logits[threadIdx.x] = score_of(shared.list[threadIdx.x]);
  }
  if (threadIdx.x == 0) {
    result->mass = mass;
    result->highest = highest;
    result->chosen = spot.logits[token];
  }
}

