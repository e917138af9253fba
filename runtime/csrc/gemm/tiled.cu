#include "common/numbers.cuh"
#include "common/ring.cuh"
#include "gemm/weights.cuh"
#include "gemm/norm.cuh"
#include "gemm/outputs.cuh"

// More tokens than a narrow product takes: a block has EIGHTS times eight rows of weights and
// WIDTHS times eight tokens, through DEPTH stages of 64 inputs of both, that all its warps fill and
// read. A warp has TILES tiles of sixteen rows by SHARE widths. It computes one segment of the
// inputs after the other, each from zero; with SPLIT above one a cluster of as many blocks shares
// the segments, and each then adds those of its share of the sums. Where tiles are EVEN, all rows of
// a thread lie at one distance from one another.

constexpr int ROW_WARPS = Config::EIGHTS / 2 / Config::TILES;
constexpr int TOKEN_WARPS = Config::WIDTHS / Config::SHARE;
constexpr int THREADS = ROW_WARPS * TOKEN_WARPS * 32;
constexpr int STAGE_BYTES = Config::EIGHTS * WEIGHT_BYTES + Config::WIDTHS * EIGHT_BYTES;
constexpr int RING_BYTES = Config::DEPTH * STAGE_BYTES;
constexpr int OWN_SEGMENTS = SEGMENTS / Config::SPLIT;
constexpr int ITEMS = Config::TILES * Config::SHARE;
constexpr int ROWS_AT_ONCE = THREADS / 8;
constexpr int TOKEN_COPIES = Config::WIDTHS * 8 / ROWS_AT_ONCE;
constexpr int ROW_COPIES = Config::EIGHTS * 8 / ROWS_AT_ONCE;
constexpr long long ROW_STEP = ROWS_AT_ONCE * ROW_BYTES / (IS_GATED ? 2 : 1);

static_assert(Config::WEIGHT_BYTES == WEIGHT_BYTES, "what stages have of weights");

static_assert(Config::WIDTHS * 8 % ROWS_AT_ONCE == 0, "whole copies of tokens");
static_assert(Config::EIGHTS * 8 % ROWS_AT_ONCE == 0, "whole copies of rows");
constexpr int PARTS_BYTES = Config::SPLIT > 1 ? OWN_SEGMENTS * ITEMS * THREADS * 16 : 0;
static_assert(RING_BYTES + PARTS_BYTES == Config::SHARED_BYTES, "what the launch asks for");

// Sixteen bytes a thread of each of its rows, an eighth of a block of inputs.
struct Loader {
  const char* tokens;
  u32 place, there;
  const char* rows[Config::EVEN ? 1 : ROW_COPIES];  // not IN_INTEGERS

  __device__ __forceinline__ Loader(const Arguments& a, u32 start) {
    int row = threadIdx.x / 8, chunk = threadIdx.x % 8, first = blockIdx.y * Config::WIDTHS * 8;
    place = start + row * 128 + (chunk ^ (row & 1) * 4) * 16;
    tokens = (const char*)a.inputs + (long long)(first + row) * Config::INPUTS * 2 + chunk * 16;
    there = 0;
#pragma unroll
    for (int i = 0; i < TOKEN_COPIES; ++i)
      if (first + row + i * ROWS_AT_ONCE < a.tokens) there |= 1u << (16 + i);
    if constexpr (IN_INTEGERS) return;
#pragma unroll
    for (int i = 0; i < ROW_COPIES; ++i) {
      Rows eight = eight_of(a, blockIdx.x * Config::EIGHTS + row / 8 + i * (ROWS_AT_ONCE / 8));
      if (row % 8 < eight.rows) there |= 1u << i;
      if (i == 0 || !Config::EVEN)
        rows[Config::EVEN ? 0 : i] = eight.first + row % 8 * ROW_BYTES + chunk * 16;
    }
  }

  __device__ __forceinline__ bool inside(int block) const {
    return Config::INPUTS % 64 == 0 || block * 64 + (int)threadIdx.x % 8 * 8 < Config::INPUTS;
  }

  __device__ __forceinline__ void weights(const Arguments& a, u32 at, int block) const {
    if constexpr (!IN_INTEGERS) {
      bool known = inside(block);
#pragma unroll
      for (int i = 0; i < ROW_COPIES; ++i) {
        const char* from = Config::EVEN ? rows[0] + i * ROW_STEP : rows[Config::EVEN ? 0 : i];
        copy_ahead(place + at + i * ROWS_AT_ONCE * 128, from + block * 128,
                   known && (there >> i & 1));
      }
      return;
    }
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < (Config::EIGHTS + THREADS / 32 - 1) / (THREADS / 32); ++i) {
      int eight = i * (THREADS / 32) + warp;
      if (Config::EIGHTS % (THREADS / 32) && eight >= Config::EIGHTS) break;
      copy_weights<false>(start() + at + eight * WEIGHT_BYTES,
                          eight_of(a, blockIdx.x * Config::EIGHTS + eight), block, lane);
    }
  }

  __device__ __forceinline__ void activations(u32 at, int block) const {
    bool known = inside(block);
#pragma unroll
    for (int i = 0; i < TOKEN_COPIES; ++i)
      copy_ahead(place + at + Config::EIGHTS * WEIGHT_BYTES + i * ROWS_AT_ONCE * 128,
                 tokens + (long long)i * ROWS_AT_ONCE * Config::INPUTS * 2 + block * 128,
                 known && (there >> (16 + i) & 1));
  }

  __device__ __forceinline__ u32 start() const {
    int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    return place - (row * 128 + (chunk ^ (row & 1) * 4) * 16);
  }
};

// Half a block of a warp's rows and tokens, as its two instructions take them. `nothing` is zero,
// which the compiler does not know: it would gather the registers anew for each width.
struct Half {
  u32 first[Config::TILES][4], second[Config::TILES][4];
  uint4 tokens[Config::SHARE];

  __device__ __forceinline__ void read(const char* rows, const char* columns, int block, int i) {
    int lane = threadIdx.x % 32;
    u32 nothing = Config::WEIGHT_BITS == 16 ? blockDim.z - 1 : 0;
#pragma unroll
    for (int t = 0; t < Config::TILES; ++t) {
      uint4 low = read_weights_half(rows + t * 2 * WEIGHT_BYTES, block, lane, i);
      uint4 high = read_weights_half(rows + (t * 2 + 1) * WEIGHT_BYTES, block, lane, i);
      first[t][0] = low.x ^ nothing, first[t][1] = high.x ^ nothing;
      first[t][2] = low.y ^ nothing, first[t][3] = high.y ^ nothing;
      second[t][0] = low.z ^ nothing, second[t][1] = high.z ^ nothing;
      second[t][2] = low.w ^ nothing, second[t][3] = high.w ^ nothing;
    }
#pragma unroll
    for (int n = 0; n < Config::SHARE; ++n)
      tokens[n] = as_weights(read_half(columns + n * EIGHT_BYTES, lane, i));
  }

  template <bool FIRST>
  __device__ __forceinline__ void multiply(float (&sums)[Config::TILES][Config::SHARE][4]) const {
#pragma unroll
    for (int n = 0; n < Config::SHARE; ++n)
#pragma unroll
      for (int t = 0; t < Config::TILES; ++t) {
        if (FIRST)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[t][n][i] = 0;
        const u32(&a)[4] = first[t];
        ::multiply(sums[t][n], a[0], a[1], a[2], a[3], tokens[n].x, tokens[n].y);
      }
#pragma unroll
    for (int n = 0; n < Config::SHARE; ++n)
#pragma unroll
      for (int t = 0; t < Config::TILES; ++t) {
        const u32(&a)[4] = second[t];
        ::multiply(sums[t][n], a[0], a[1], a[2], a[3], tokens[n].z, tokens[n].w);
      }
  }
};

template <bool YES>
struct Yes {
  static constexpr bool value = YES;
};

// Epilogue of a tile and a width.
struct Item {
  int row, token;

  __device__ __forceinline__ Item(int tile, int width) {
    int eight = blockIdx.x * Config::EIGHTS + tile * 2, lane = threadIdx.x % 32;
    row = (IS_GATED ? eight / 2 : eight) * 8 + lane / 4;
    token = (blockIdx.y * Config::WIDTHS + width) * 8 + lane % 4 * 2;
  }

  __device__ __forceinline__ void before(const Arguments& a, float (&numbers)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      numbers[i] = Config::OUTPUT == RESIDUAL ? residual_of(a, row + i / 2 * 8, token + i % 2) : 0;
  }

  __device__ __forceinline__ void finish(const Arguments& a, int rank, const float (&sum)[4],
                                         const float (&before)[4]) const {
    float4 added = added_to(a, rank, row, token);
    if constexpr (IS_GATED) {
      finish_gated(a, row, token, sum[0], sum[2], added.x, added.z);
      finish_gated(a, row, token + 1, sum[1], sum[3], added.y, added.w);
      return;
    }
    float more[4] = {added.x, added.y, added.z, added.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      finish_one(a, row + i / 2 * 8, token + i % 2, sum[i], before[i], more[i]);
  }
};

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float4 read_part(u32 address, int block) {
  float4 x;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, Config::RESIDENT)
    product(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) char memory[];
  int warp = threadIdx.x / 32;
  int tile = warp % ROW_WARPS * Config::TILES, width = warp / ROW_WARPS * Config::SHARE;
  int segment = Config::SPLIT > 1 ? blockIdx.z * OWN_SEGMENTS : 0, block = first_block(segment);
  int end = Config::SPLIT > 1 ? first_block(segment + OWN_SEGMENTS) : BLOCKS;
  Loader load(a, shared_address(memory));
#pragma unroll
  for (int i = 0; i < Config::DEPTH; ++i)
    if (block + i < end) load.weights(a, i * STAGE_BYTES, block + i);
  int rank = rank_of(a);
  wait_for_predecessors();
#pragma unroll
  for (int i = 0; i < Config::DEPTH; ++i) {
    if (block + i < end) load.activations(i * STAGE_BYTES, block + i);
    end_copies();
  }
  wait_copies<Config::DEPTH - 1>();
  __syncthreads();

  const char* rows = memory + tile * 2 * WEIGHT_BYTES;
  const char* columns = memory + Config::EIGHTS * WEIGHT_BYTES + width * EIGHT_BYTES;
  u32 at = 0;
  Half halves[2];
  halves[0].read(rows, columns, block, 0);
  float sums[Config::TILES][Config::SHARE][4];
  float total[Config::TILES][Config::SHARE][4];  // of all segments, without a cluster
#pragma unroll
  for (int t = 0; t < Config::TILES; ++t)
#pragma unroll
    for (int n = 0; n < Config::SHARE; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[t][n][i] = -0.0f;  // which a sum leaves as it is

  // One half is read while the other is multiplied. Behind the barrier this stage is free.
  auto step = [&](auto first) {
    halves[1].read(rows + at, columns + at, block, 1);
    halves[0].template multiply<decltype(first)::value>(sums);
    wait_copies<Config::DEPTH - 2>();
    __syncthreads();
    u32 next = at + STAGE_BYTES == RING_BYTES ? 0 : at + STAGE_BYTES;
    if (block + Config::DEPTH < end) {
      load.weights(a, at, block + Config::DEPTH);
      load.activations(at, block + Config::DEPTH);
    }
    end_copies();
    halves[0].read(rows + next, columns + next, block + 1, 0);
    halves[1].multiply<false>(sums);
    at = next;
    ++block;
  };

#pragma unroll 1
  for (int i = 0; i < OWN_SEGMENTS; ++i) {
    int behind = first_block(segment + i + 1);
    if constexpr (BLOCKS >= SEGMENTS) {
      step(Yes<true>{});
    } else {
#pragma unroll
      for (int j = 0; j < ITEMS * 4; ++j)
        sums[j / 4 / Config::SHARE][j / 4 % Config::SHARE][j % 4] = 0;
    }
#pragma unroll 1
    while (block < behind) step(Yes<false>{});
#pragma unroll
    for (int t = 0; t < Config::TILES; ++t)
#pragma unroll
      for (int n = 0; n < Config::SHARE; ++n) {
        float(&sum)[4] = sums[t][n];
        if constexpr (Config::SPLIT == 1) {
#pragma unroll
          for (int j = 0; j < 4; ++j) total[t][n][j] = __fadd_rn(total[t][n][j], sum[j]);
        } else {
          float4* parts = (float4*)(memory + RING_BYTES) + threadIdx.x;
          parts[((i * Config::TILES + t) * Config::SHARE + n) * THREADS] =
              make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
      }
  }

  if constexpr (Config::SPLIT == 1) {
#pragma unroll
    for (int t = 0; t < Config::TILES; ++t)
#pragma unroll
      for (int n = 0; n < Config::SHARE; ++n) Item(tile + t, width + n).before(a, sums[t][n]);
#pragma unroll
    for (int t = 0; t < Config::TILES; ++t)
#pragma unroll
      for (int n = 0; n < Config::SHARE; ++n)
        Item(tile + t, width + n).finish(a, rank, total[t][n], sums[t][n]);
    return;
  }
  meet_cluster();
  u32 parts = shared_address(memory) + RING_BYTES + threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < (ITEMS + Config::SPLIT - 1) / Config::SPLIT; ++i) {
    int index = i * Config::SPLIT + blockIdx.z;
    if (ITEMS % Config::SPLIT && index >= ITEMS) break;
    Item item(tile + index / Config::SHARE, width + index % Config::SHARE);
    float before[4], sum[4] = {-0.0f, -0.0f, -0.0f, -0.0f};
    item.before(a, before);
    float4 part[SEGMENTS];
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s)
      part[s] = read_part(parts + (s % OWN_SEGMENTS * ITEMS + index) * THREADS * 16,
                          s / OWN_SEGMENTS);
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) {
      sum[0] = __fadd_rn(sum[0], part[s].x);
      sum[1] = __fadd_rn(sum[1], part[s].y);
      sum[2] = __fadd_rn(sum[2], part[s].z);
      sum[3] = __fadd_rn(sum[3], part[s].w);
    }
    item.finish(a, rank, sum, before);
  }
  meet_cluster();
}
