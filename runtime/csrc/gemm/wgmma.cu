#include "common/numbers.cuh"
#include "common/ring.cuh"
#include "gemm/weights.cuh"
#include "gemm/norm.cuh"
#include "gemm/outputs.cuh"
#include "common/staged.cuh"
#include "gemm/wgmma.cuh"

// More tokens than a narrow product takes, by the instructions of compute capability 9.0 that four
// warps give together: a group of them has 64 rows of weights, in registers, and all WIDTHS times
// eight tokens of its block, in shared memory. Both come through DEPTH stages of 64 inputs, which
// four more warps fill: tokens lie in memory as stages have them. With SHARES above one as many
// groups have the same rows and share the segments of the inputs; each then adds up a part of the
// sums. The rows of a group are of one matrix, or of gate and up. With PASSED what comes of these is
// written as stages have it, for the next product: then a warp has two rows of each eight of 32.

constexpr int GROUPS = Config::EIGHTS / 8;
constexpr int CONSUMERS = GROUPS * Config::SHARES * 128;
constexpr int THREADS = CONSUMERS + 128;
constexpr int TOKEN_BYTES = Config::WIDTHS * EIGHT_BYTES;
constexpr int STAGE_BYTES = Config::EIGHTS * EIGHT_BYTES + TOKEN_BYTES;
constexpr int RING_BYTES = Config::DEPTH * STAGE_BYTES;
constexpr int PART_BYTES = Config::EIGHTS * Config::WIDTHS * 256;
constexpr int PARTS_BYTES = Config::SHARES > 1 ? SEGMENTS * PART_BYTES : 0;
constexpr int SUMS = Config::WIDTHS * 4;
constexpr int OWN_SEGMENTS = SEGMENTS / Config::SHARES;
constexpr int OWN_WIDTHS = Config::WIDTHS / Config::SHARES;
constexpr int ROW_COPIES = Config::EIGHTS / 2;

// Registers are handed over by the warps that fill stages: what a thread has at first, and then.
constexpr int SHARED_OUT = 512 / Config::RESIDENT / (GROUPS * Config::SHARES + 1) / 8 * 8;
constexpr int LOADING = GROUPS * Config::SHARES == 2 ? 56 : GROUPS * Config::SHARES == 3 ? 32 : 40;
constexpr int LEFT = (SHARED_OUT * (GROUPS * Config::SHARES + 1) - LOADING) /
                     (GROUPS * Config::SHARES) / 8 * 8;
constexpr int MULTIPLYING = LEFT > 240 ? 240 : LEFT;

// Two groups that have a multiprocessor to themselves wait for one another otherwise (H200, 7 to 11 %
// of inputs of 4,096 and more; smaller blocks and three groups lose 1 to 3 %).
constexpr bool PIPELINED = GROUPS == 2 && Config::SHARES == 1;

static_assert(RING_BYTES + PARTS_BYTES + 128 == Config::SHARED_BYTES, "what the launch asks for");
static_assert(Config::DEPTH <= 8 && Config::EIGHTS % 8 == 0, "barriers and groups");
static_assert(Config::WIDTHS % Config::SHARES == 0, "whole shares");
static_assert(Config::DEPTH % Config::SHARES == 0, "a stage is always one share's");
static_assert(!Config::PASSED || (IS_GATED && !Config::ADDED), "what can be passed on");
static_assert(Config::INPUTS % 64 == 0 && BLOCKS % Config::SHARES == 0, "whole blocks");

// The barriers of a stage: that it is full, and that it is empty again.
struct Barriers {
  u32 first;

  __device__ __forceinline__ u32 full(int stage) const { return first + stage * 8; }
  __device__ __forceinline__ u32 empty(int stage) const { return first + 64 + stage * 8; }

  __device__ __forceinline__ void begin() const {
#pragma unroll
    for (int i = 0; i < Config::DEPTH; ++i) {
      begin_barrier(full(i), 128 + 1);
      begin_barrier(empty(i), GROUPS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// The block of inputs of the n-th stage that is filled, of each share in turn.
__device__ __forceinline__ int block_of(int n) {
  if constexpr (Config::SHARES == 1) return n;
  return n % Config::SHARES * (BLOCKS / Config::SHARES) + n / Config::SHARES;
}

// Sixteen bytes a thread of each of its rows, an eighth of a block of inputs: of each group's rows
// every sixteenth.
struct Loader {
  const Arguments& a;
  u32 start, place, there;
  Barriers barriers;
  const char* first;

  __device__ __forceinline__ Loader(const Arguments& a, u32 start, Barriers barriers)
      : a(a), start(start), barriers(barriers) {
    int row = threadIdx.x % 128 / 8, chunk = threadIdx.x % 8;
    place = start + row * 128 + (chunk ^ (row & 1) * 4) * 16;
    there = 0;
#pragma unroll
    for (int i = 0; i < ROW_COPIES; ++i) {
      Rows eight = eight_of(a, blockIdx.y * Config::EIGHTS + i * 2 + row / 8);
      if (row % 8 < eight.rows) there |= 1u << i;
      int own = Config::PASSED ? row % 8 / 2 * 8 + row % 2 : row % 8;
      if (i == 0) first = eight.first + own * ROW_BYTES + chunk * 16;
    }
    asm volatile("" : "+r"(there));  // or it would be found out anew for each copy
  }

  __device__ __forceinline__ void weights(int stage, int block) const {
    constexpr long long step = (IS_GATED ? 8 : 16) * ROW_BYTES;
    u32 to = place + stage * STAGE_BYTES;
    const char* from = first + block * 128;
#pragma unroll(Config::MATRICES > 1 && !IS_GATED ? 1 : GROUPS)
    for (int group = 0; group < GROUPS; ++group) {
      if (Config::MATRICES > 1 && !IS_GATED) {
        int row = threadIdx.x % 128 / 8;
        Rows eight = eight_of(a, blockIdx.y * Config::EIGHTS + group * 8 + row / 8);
        from = eight.first + row % 8 * ROW_BYTES + threadIdx.x % 8 * 16 + block * 128;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy_ahead(to + (group * 8 + i * 2) * EIGHT_BYTES,
                   from + i * (Config::PASSED ? step / 4 : step),
                   there >> (group * 4 + i) & 1);
      if (Config::MATRICES == 1 || IS_GATED) from += 4 * step;
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barriers.full(stage))
                 : "memory");
  }

  __device__ __forceinline__ void tokens(int stage, int block) const {
    if (threadIdx.x != CONSUMERS) return;
    int first = blockIdx.x * Config::WIDTHS * 8;
    int bytes = min(Config::WIDTHS * 8, a.tokens - first) * 128;
    const char* from = (const char*)a.inputs + ((long long)block * a.tokens + first) * 128;
    expect_bytes(barriers.full(stage), bytes);
    copy_bulk(start + stage * STAGE_BYTES + Config::EIGHTS * EIGHT_BYTES, from, bytes,
              barriers.full(stage));
  }

  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (int n = 0; n < Config::DEPTH && n < BLOCKS; ++n) weights(n, block_of(n));
    wait_for_predecessors();
    int stage = 0, parity = 1;
#pragma unroll 1
    for (int n = 0; n < BLOCKS; ++n) {
      if (n >= Config::DEPTH) {
        wait_barrier(barriers.empty(stage), parity);
        weights(stage, block_of(n));
      }
      tokens(stage, block_of(n));
      if (++stage == Config::DEPTH) stage = 0, parity ^= 1;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
};

// Epilogue of eight tokens.
struct Item {
  int row, token;

  __device__ __forceinline__ Item(int width) {
    int group = Config::SHARES > 1 ? threadIdx.x / 128 % GROUPS : threadIdx.x / 128;
    int eight = blockIdx.y * Config::EIGHTS + group * 8 + threadIdx.x % 128 / 32 * 2;
    int lane = threadIdx.x % 32;
    row = (IS_GATED ? eight / 2 : eight) * 8 + lane / 4;
    if (Config::PASSED) row = row / 32 * 32 + lane / 8 * 8 + eight / 2 % 4 * 2 + lane / 4 % 2;
    token = (blockIdx.x * Config::WIDTHS + width) * 8 + lane % 4 * 2;
  }

  __device__ __forceinline__ void before(const Arguments& a, float* numbers) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      numbers[i] = Config::OUTPUT == RESIDUAL ? residual_of(a, row + i / 2 * 8, token + i % 2) : 0;
  }

  __device__ __forceinline__ void finish(const Arguments& a, int rank, const float* sum,
                                         const float* before) const {
    float4 added = added_to(a, rank, row, token);
    if constexpr (Config::PASSED) {
      // Of two rows side by side each lane takes one token.
      int odd = row % 2;
      u32 first = activation(sum[0], sum[2]), second = activation(sum[1], sum[3]);
      u32 other = __shfl_xor_sync(~0u, odd ? first : second, 4);
      u32 word = odd ? other | second << 16 : first | other << 16;
      if (row < a.rows && token + odd < a.tokens)
        ((u32*)a.out)[staged_word(token + odd, a.tokens, row / 2)] = word;
    } else if constexpr (IS_GATED) {
      finish_gated(a, row, token, sum[0], sum[2], added.x, added.z);
      finish_gated(a, row, token + 1, sum[1], sum[3], added.y, added.w);
    } else {
      float more[4] = {added.x, added.y, added.z, added.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        finish_one(a, row + i / 2 * 8, token + i % 2, sum[i], before[i], more[i]);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, Config::RESIDENT)
    product(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) char memory[];
  u32 start = shared_address(memory);
  Barriers barriers = {start + RING_BYTES + PARTS_BYTES};
  if (threadIdx.x == 0) barriers.begin();
  __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADING));
    Loader(a, start, barriers).run();
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING));
  int rank = rank_of(a);
  wait_for_predecessors();
  int share = threadIdx.x / 128 / GROUPS, group = threadIdx.x / 128 % GROUPS;
  int lane = threadIdx.x % 32, stage = share, parity = 0;
  const char* own = memory + (group * 8 + threadIdx.x % 128 / 32 * 2) * EIGHT_BYTES;
  u64 columns = operand(start + Config::EIGHTS * EIGHT_BYTES);

  int last = 0;
  // Half a stage is read while the one before is multiplied, and a stage is empty once the first
  // half of the next one is on its way.
  auto multiply_halves = [&](float(&sums)[SUMS], int block, bool first) {
    wait_barrier(barriers.full(stage), parity);
    const char* rows = own + stage * STAGE_BYTES;
    u64 tokens = columns + stage * (STAGE_BYTES / 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint4 low = read_weights_half(rows, block, lane, i);
      uint4 high = read_weights_half(rows + EIGHT_BYTES, block, lane, i);
      u32 a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
      begin_products();
      multiply_registers(sums, a[0], tokens + i * 4, i > 0 || !first);
      multiply_registers(sums, a[1], tokens + i * 4 + 2, true);
      end_products();
      wait_but_newest();
      if (i == 0 && !first && lane == 0) arrive_at(barriers.empty(last));
    }
    last = stage;
    stage += Config::SHARES;
    if (stage >= Config::DEPTH) stage -= Config::DEPTH, parity ^= 1;
  };
  auto multiply_whole = [&](float(&sums)[SUMS], int block, bool first) {
    wait_barrier(barriers.full(stage), parity);
    const char* rows = own + stage * STAGE_BYTES;
    u64 tokens = columns + stage * (STAGE_BYTES / 16);
    u32 a[4][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint4 low = read_weights_half(rows, block, lane, i);
      uint4 high = read_weights_half(rows + EIGHT_BYTES, block, lane, i);
      a[2 * i][0] = low.x, a[2 * i][1] = high.x, a[2 * i][2] = low.y, a[2 * i][3] = high.y;
      a[2 * i + 1][0] = low.z, a[2 * i + 1][1] = high.z;
      a[2 * i + 1][2] = low.w, a[2 * i + 1][3] = high.w;
    }
    begin_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_registers(sums, a[i], tokens + i * 2, i > 0 || !first);
    end_products();
    wait_products(sums);
    if (lane == 0) arrive_at(barriers.empty(stage));
    stage += Config::SHARES;
    if (stage >= Config::DEPTH) stage -= Config::DEPTH, parity ^= 1;
  };
  auto multiply_stage = [&](float(&sums)[SUMS], int block, bool first) {
    if constexpr (PIPELINED)
      multiply_halves(sums, block, first);
    else
      multiply_whole(sums, block, first);
  };
  auto end_segment = [&](float(&sums)[SUMS], bool any) {
    if constexpr (PIPELINED) {
      wait_products(sums);
      if (any && lane == 0) arrive_at(barriers.empty(last));
    }
  };

  float sums[SUMS];
  int block = Config::SHARES == 1 ? 0 : share * (BLOCKS / Config::SHARES);
  if constexpr (Config::SHARES == 1) {
    float total[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) total[i] = -0.0f, sums[i] = 0;  // which a sum leaves as it is
#pragma unroll 1
    for (int i = 0; i < SEGMENTS; ++i) {
      int behind = first_block(i + 1);
      bool first = true;
#pragma unroll 1
      for (; block < behind; ++block, first = false) multiply_stage(sums, block, first);
      end_segment(sums, !first);
#pragma unroll
      for (int j = 0; j < SUMS; ++j) total[j] = __fadd_rn(total[j], first ? 0.0f : sums[j]);
    }
#pragma unroll
    for (int n = 0; n < Config::WIDTHS; ++n) Item(n).before(a, sums + n * 4);
#pragma unroll
    for (int n = 0; n < Config::WIDTHS; ++n) Item(n).finish(a, rank, total + n * 4, sums + n * 4);
    return;
  }
  float4* parts = (float4*)(memory + RING_BYTES) + threadIdx.x % (GROUPS * 128);
#pragma unroll
  for (int j = 0; j < SUMS; ++j) sums[j] = 0;
#pragma unroll 1
  for (int i = 0; i < OWN_SEGMENTS; ++i) {
    int behind = first_block(share * OWN_SEGMENTS + i + 1);
    bool first = true;
#pragma unroll 1
    for (; block < behind; ++block, first = false) multiply_stage(sums, block, first);
    end_segment(sums, !first);
#pragma unroll
    for (int n = 0; n < Config::WIDTHS; ++n)
      parts[((share * OWN_SEGMENTS + i) * Config::WIDTHS + n) * GROUPS * 128] =
          first ? float4{}
                : make_float4(sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3]);
  }
  float before[OWN_WIDTHS * 4];
#pragma unroll
  for (int n = 0; n < OWN_WIDTHS; ++n) Item(share * OWN_WIDTHS + n).before(a, before + n * 4);
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
  for (int n = 0; n < OWN_WIDTHS; ++n) {
    float total[4] = {-0.0f, -0.0f, -0.0f, -0.0f};
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) {
      float4 part = parts[(s * Config::WIDTHS + share * OWN_WIDTHS + n) * GROUPS * 128];
      total[0] = __fadd_rn(total[0], part.x);
      total[1] = __fadd_rn(total[1], part.y);
      total[2] = __fadd_rn(total[2], part.z);
      total[3] = __fadd_rn(total[3], part.w);
    }
    Item(share * OWN_WIDTHS + n).finish(a, rank, total, before + n * 4);
  }
}
