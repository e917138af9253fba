// Preparation of a head of a token between its product and attention: its norm if the model has
// one, its rotation, its scale, and one rounding. A warp takes a head; both kernels that do this
// share these functions, so their bits are the same.
//
// Elements go by pairs: those of the first ROTARY are turned, element i with i + ROTARY / 2; the
// others stay, and are paired alike so that every pair is two elements DIM-wide apart.

constexpr int DIM = Config::DIM;
constexpr int ROTARY = Config::ROTARY;
constexpr int QUERY_HEADS = Config::QUERY_HEADS;
constexpr int KV_HEADS = Config::KV_HEADS;
constexpr int PAIRS = (DIM / 2 + 31) / 32;

__device__ int first_of(int pair) { return pair < ROTARY / 2 ? pair : pair + ROTARY / 2; }
__device__ int second_of(int pair) { return pair + (pair < ROTARY / 2 ? ROTARY : DIM) / 2; }

// Cosines and sines of a lane's pairs; those of pairs that stay are 1 and 0.
struct Angles {
  float cos[PAIRS], sin[PAIRS];

  __device__ void load(const float* cosines, const float* sines) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      int pair = threadIdx.x % 32 + i * 32;
      bool turned = pair < ROTARY / 2;
      cos[i] = turned ? __ldg(cosines + pair) : 1.0f;
      sin[i] = turned ? __ldg(sines + pair) : 0.0f;
    }
  }
};

// The gains of a lane's pairs; ones where there is no norm.
struct Gains {
  float one[PAIRS], other[PAIRS];

  __device__ Gains() {}
  __device__ Gains(bool first, const Gains& a, const Gains& b) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      one[i] = first ? a.one[i] : b.one[i];
      other[i] = first ? a.other[i] : b.other[i];
    }
  }

  __device__ void load(const u16* gain) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      int pair = threadIdx.x % 32 + i * 32;
      bool there = gain && pair < DIM / 2;
      one[i] = there ? number(__ldg(gain + first_of(pair))) : 1.0f;
      other[i] = there ? number(__ldg(gain + second_of(pair))) : 1.0f;
    }
  }
};

// The two elements of each of a lane's pairs.
struct Head {
  float one[PAIRS], other[PAIRS];

  __device__ void load(const float* raw) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      int pair = threadIdx.x % 32 + i * 32;
      bool there = pair < DIM / 2;
      one[i] = there ? __ldcg(raw + first_of(pair)) : 0.0f;
      other[i] = there ? __ldcg(raw + second_of(pair)) : 0.0f;
    }
  }

  // The sum of the squares of a lane's pairs.
  __device__ float squares() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      sum = __fmaf_rn(one[i], one[i], sum);
      sum = __fmaf_rn(other[i], other[i], sum);
    }
    return sum;
  }

  // By the sum of all squares. Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
  __device__ void normalise(float sum, const Gains& gains, float eps) {
    float root = rsqrtf(__fmaf_rn(sum, 1.0f / DIM, eps));
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      one[i] = __fmul_rn(__fmul_rn(one[i], root), gains.one[i]);
      other[i] = __fmul_rn(__fmul_rn(other[i], root), gains.other[i]);
    }
  }

  // Su et al., RoFormer, 2021.
  __device__ void turn(const Angles& by) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      float a = one[i], b = other[i];
      one[i] = __fmaf_rn(-b, by.sin[i], __fmul_rn(a, by.cos[i]));
      other[i] = __fmaf_rn(a, by.sin[i], __fmul_rn(b, by.cos[i]));
    }
  }

  __device__ void store(u16* to, float scale) const {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      int pair = threadIdx.x % 32 + i * 32;
      if (pair >= DIM / 2) continue;
      to[first_of(pair)] = element(__fmul_rn(one[i], scale));
      to[second_of(pair)] = element(__fmul_rn(other[i], scale));
    }
  }
};

// Sums of several heads over their warp.
template <int COUNT>
__device__ void sum_of_warp(float (&sums)[COUNT]) {
#pragma unroll
  for (int i = 16; i; i >>= 1)
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
      sums[k] = __fadd_rn(sums[k], __shfl_xor_sync(~0u, sums[k], i));
}

// Address of the cosines or sines of a token in a table of `rows` (0: one that all rows share).
__device__ const float* angles_of(const float* table, long long position, int row, int rows) {
  return table + ((long long)row * rows + position) * (ROTARY / 2);
}
