// Sampling by row. The order of the steps and the treatment of equal scores are specified by the
// NumPy forms in runtime/sampling. Sums are integers, so their order does not matter: a weight is
// a multiple of 2^-40, at most 1.
// Scores are ranked by one integer, "rank": the inverted sortable bits of the score above the
// token id (M. Herf, "Radix tricks", 2001). The smallest rank is the highest score, the lowest id
// among equals, and no two tokens have the same.

typedef unsigned int u32;
typedef unsigned long long u64;

#define TOP 20
#define ROWS 256
#define SEEN 0x80000000u
#define COUNT 0x7FFFFFFFu
#define NEVER 0xFFFFFFFFFFFFFFFFull
#define HISTORY 1
#define BIAS 2
#define MASK 4
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
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

struct Kept {
  int count;
  int source[ROWS];
};

struct Batch {
  const float* logits;
  const INDEX* start;
  int* next_tokens;
  const Row* rows;
  u32* history;  // [rows, pitch]: SEEN, and how often generated
  const float* bias;
  const u32* mask;
  Partial* partial;
  State* state;
  Result* results;
  int vocab;
  int pitch;
  int mask_pitch;
  int waiting;
};

__device__ u32 sortable(float x) {
  // Adding zero makes -0.0 and 0.0, which are equal, one bit pattern.
  u32 bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float from_sortable(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

__device__ u64 rank_of(float x, int id) { return (u64)~sortable(x) << 32 | (u32)id; }
__device__ float score_of(u64 rank) { return from_sortable(~(u32)(rank >> 32)); }
__device__ bool finite(float x) { return fabsf(x) <= LARGEST; }
__device__ u64 fixed(float weight) { return __float2ull_rn(weight * 1099511627776.0f); }

__device__ float adjusted(const Batch& batch, const Row& row, int r, float x, int id) {
  if (row.flags & HISTORY) {
    u32 past = batch.history[(long long)r * batch.pitch + id];
    if (past & SEEN) x = x > 0 ? x / row.repetition : x * row.repetition;
    if (past & COUNT) x -= row.presence + row.frequency * (float)(past & COUNT);
  }
  if (row.flags & BIAS) x += batch.bias[(long long)r * batch.pitch + id];
  if (row.flags & MASK) {
    u32 word = batch.mask[(long long)r * batch.mask_pitch + (id >> 5)];
    if (!(word >> (id & 31) & 1)) x = MINUS_INFINITY;
  }
  return x;
}

__device__ void accept(const Batch& batch, const Row& row, int r, int token) {
  batch.next_tokens[r] = token;
  if (row.flags & HISTORY) {
    u32* past = batch.history + (long long)r * batch.pitch + token;
    *past = (*past | SEEN) + 1;
  }
}

// ---- the highest score of every row, over several blocks a row ----

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

__device__ Scan scan_row(const Batch& batch, const Row& row, int r) {
  Scan scan;
  const float* logits = batch.logits + (long long)r * batch.vocab;
  int first = blockIdx.x * blockDim.x + threadIdx.x;
  int stride = gridDim.x * blockDim.x;
  if (row.flags || batch.vocab % 4) {
    for (int i = first; i < batch.vocab; i += stride)
      scan.take(logits[i], adjusted(batch, row, r, logits[i], i), i);
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

__device__ void finish_row(const Batch& batch, const Row& row, int r) {
  Partial* partial = batch.partial + r;
  u64 best = atomicExch(&partial->best, NEVER);
  u32 raw = atomicExch(&partial->raw, 0u);
  bool failed = atomicExch(&partial->bad, 0u);
  partial->done = 0;
  Result* result = batch.results + r;
  float highest = score_of(best);
  bool waits = r < batch.waiting;
  if (!waits) failed |= !finite(highest);
  int token = waits || failed || row.temperature > 0 ? -1 : (int)(u32)best;
  result->token = token;
  result->failed = failed;
  if (waits) return;
  batch.state[r].highest = highest;
  batch.state[r].raw_highest = from_sortable(raw);
  batch.state[r].failed = failed;
  if (token >= 0)
    accept(batch, row, r, token);
  else
    batch.next_tokens[r] = -1;
}

extern "C" __global__ void __launch_bounds__(256) find_best(Batch batch) {
  __shared__ u64 bests[8];
  __shared__ u32 raws[8];
  int r = blockIdx.y;
  Row row = batch.rows[r];
  Scan scan = scan_row(batch, row, r);
  u64 best = rank_of(scan.best, scan.id);
  u32 raw = sortable(scan.raw);
  for (int i = 16; i; i >>= 1) {
    best = min(best, __shfl_xor_sync(~0u, best, i));
    raw = max(raw, __shfl_xor_sync(~0u, raw, i));
  }
  if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best, raws[threadIdx.x / 32] = raw;
  int bad = __syncthreads_or(scan.bad);
  if (threadIdx.x) return;
  for (int i = 1; i < 8; ++i) best = min(best, bests[i]), raw = max(raw, raws[i]);
  Partial* partial = batch.partial + r;
  atomicMin(&partial->best, best);
  atomicMax(&partial->raw, raw);
  if (bad) atomicOr(&partial->bad, 1u);
  __threadfence();
  if (atomicAdd(&partial->done, 1u) == gridDim.x - 1) {
    __threadfence();
    finish_row(batch, row, r);
  }
}

