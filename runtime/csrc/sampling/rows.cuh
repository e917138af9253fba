// Sampling by row; it comes behind ranks.cuh. The order of the steps and the treatment of equal
// scores are specified by the NumPy forms in runtime/sampling. Sums are integers, so their order
// does not matter: a weight is a multiple of 2^-40, at most 1.

#define TOP 20
#define SLOTS 4
#define ROWS 256
#define SEEN 0x80000000u
#define COUNT 0x7FFFFFFFu
#define HISTORY 1
#define BIAS 2
#define MASK 4
#define LARGEST 3.402823466e+38f

struct Row {
  u64 seed;
  double top_p;
  float temperature;
  float min_p;
  float repetition;
  float presence;
  float frequency;
  int top_k;
  int logprobs;
  u32 flags;
};

struct Partial {
  u64 best;
  u32 raw;
  u32 bad;
  u32 done;
  u32 unused;
};

struct State {
  float highest;
  float raw_highest;
  int failed;
  int unused;
};

struct Result {
  u64 mass;
  float chosen;
  float highest;
  int token;
  int failed;
  int ids[TOP];
  float logits[TOP];
};

struct Moves {
  int count;
  int source[ROWS];
  int target[ROWS];
};

// Ring position among the slots of results of steps that were captured with their sampling.
struct Turn {
  u32 number;
  u32 done;  // rows of this one
  int live;  // rows that it has; others are padding
  int unused;
};

// Tables are by the place of a row; row i of a step's logits and results has place first + i.
struct Batch {
  const float* logits;
  const INDEX* start;
  int* next_tokens;
  const Row* rows;
  u32* history;  // [rows, pitch]: SEEN, and how often generated
  const float* bias;
  const u32* masks;  // [rows, words]: bit id % 32 of word id / 32 allows a token
  Partial* partial;
  State* state;
  Result* results;
  int vocab;
  int pitch;
  int first;
  int picked;  // rows from this one on are only checked
  // Or null. With it `results` are SLOTS slots of `capacity` rows, which take turns, and a row that
  // is sampled holds one token more from then on.
  Turn* turn;
  int capacity;
  int words;
};

// Place at which a token is sampled: a row's logits, the token's position, and its result. The
// tokens of `path` are behind those of the row's history.
struct Spot {
  int r;
  const float* logits;
  u64 position;
  Result* result;
  const int* path;
  int depth;
};

__device__ Spot spot_of(const Batch& batch, int i) {
  int r = batch.first + i;
  return {r, batch.logits + (long long)i * batch.vocab, (u64)batch.start[r], batch.results + i};
}

__device__ bool finite(float x) { return fabsf(x) <= LARGEST; }
__device__ u64 fixed(float weight) { return __float2ull_rn(weight * 1099511627776.0f); }

// Penalties, bias and mask: a token that is not allowed has no score, whatever its logit.
__device__ float adjusted(const Batch& batch, const Row& row, const Spot& spot, float x, int id) {
  long long place = (long long)spot.r * batch.pitch + id;
  if (row.flags & HISTORY) {
    u32 past = batch.history[place];
#pragma unroll 1
    for (int i = 0; i < spot.depth; ++i)
      if (spot.path[i] == id) past = (past | SEEN) + 1;
    if (past & SEEN) x = x > 0 ? x / row.repetition : x * row.repetition;
    if (past & COUNT) x -= row.presence + row.frequency * (float)(past & COUNT);
  }
  if (row.flags & BIAS) x += batch.bias[place];
  if (row.flags & MASK) {
    u32 word = batch.masks[(long long)spot.r * batch.words + id / 32];
    if (!(word >> id % 32 & 1)) x = MINUS_INFINITY;
  }
  return x;
}

__device__ void accept(const Batch& batch, const Row& row, const Spot& spot, int token) {
  batch.next_tokens[spot.r] = token;
  spot.result->token = token;
  if (row.logprobs >= 0) spot.result->chosen = spot.logits[token];
  if (row.flags & HISTORY) {
    u32* past = batch.history + (long long)spot.r * batch.pitch + token;
    *past = (*past | SEEN) + 1;
  }
}

// ---- the highest score of a row ----

struct Scan {
  float best = MINUS_INFINITY;
  float raw = MINUS_INFINITY;
  int id = 0;
  bool bad = false;
  __device__ void take(float logit, float score, int i) {
    bad |= !finite(logit);
    raw = fmaxf(raw, logit);
    // Ids ascend within a thread: the first of equals stays.
    if (score > best) best = score, id = i;
  }
};

// Logits of one spot from `first` on, at a distance of `stride`.
__device__ Scan scan_row(const Batch& batch, const Row& row, const Spot& spot, int first,
                         int stride) {
  const float* logits = spot.logits;
  Scan scan;
  if (row.flags || batch.vocab % 4) {
    for (int i = first; i < batch.vocab; i += stride)
      scan.take(logits[i], adjusted(batch, row, spot, logits[i], i), i);
    return scan;
  }
#pragma unroll 4
  for (int i = first; i < batch.vocab / 4; i += stride) {
    float4 x = ((const float4*)logits)[i];
    scan.take(x.x, x.x, 4 * i);
    scan.take(x.y, x.y, 4 * i + 1);
    scan.take(x.z, x.z, 4 * i + 2);
    scan.take(x.w, x.w, 4 * i + 3);
  }
  return scan;
}

struct Best {
  u64 best;
  u32 raw;
  u32 bad;
};

// Reduction over the threads of a block; every thread gets it.
template <int WARPS>
__device__ Best join(const Scan& scan) {
  __shared__ u64 bests[WARPS];
  __shared__ u32 raws[WARPS];
  Best found = {rank_of(scan.best, scan.id), sortable(scan.raw), 0};
  for (int i = 16; i; i >>= 1) {
    found.best = min(found.best, __shfl_xor_sync(~0u, found.best, i));
    found.raw = max(found.raw, __shfl_xor_sync(~0u, found.raw, i));
  }
  if (threadIdx.x % 32 == 0) {
    bests[threadIdx.x / 32] = found.best;
    raws[threadIdx.x / 32] = found.raw;
  }
  found.bad = __syncthreads_or(scan.bad);
  for (int i = 0; i < WARPS; ++i) {
    found.best = min(found.best, bests[i]);
    found.raw = max(found.raw, raws[i]);
  }
  return found;
}

// One thread a block adds what the block has found; true for the last block, which also takes
// the sum and leaves everything as it was before the first.
__device__ bool combine(Partial* partial, Best* found) {
  atomicMin(&partial->best, found->best);
  atomicMax(&partial->raw, found->raw);
  if (found->bad) atomicOr(&partial->bad, 1u);
  __threadfence();
  if (atomicAdd(&partial->done, 1u) != gridDim.x - 1) return false;
  __threadfence();
  found->best = atomicExch(&partial->best, NEVER);
  found->raw = atomicExch(&partial->raw, 0u);
  found->bad = atomicExch(&partial->bad, 0u);
  partial->done = 0;
  return true;
}

__device__ void finish_row(const Batch& batch, const Row& row, const Spot& spot,
                           const Best& found) {
  int r = spot.r;
  bool failed = found.bad;
  float highest = score_of(found.best);
  bool waits = r - batch.first >= batch.picked;
  if (!waits) failed |= !finite(highest);
  int token = waits || failed || row.temperature > 0 ? -1 : (int)(u32)found.best;
  spot.result->token = token;
  spot.result->failed = failed;
  if (waits) return;
  batch.state[r].highest = highest;
  batch.state[r].raw_highest = from_sortable(found.raw);
  batch.state[r].failed = failed;
  if (token >= 0)
    accept(batch, row, spot, token);
  else
    batch.next_tokens[r] = -1;
}

