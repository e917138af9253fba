// x A in the product itself, of up to eight tokens. The blocks of a cluster share the segments of the
// inputs: of its own a warp multiplies by sixteen ranks of A at a time, the last ones beside the
// weights, and tells all blocks of the cluster, which has rows of up to PARTS matrices. The sums have
// the order of every product. It comes behind outputs.cuh and norm.cuh.

#ifndef SHRINKING
#define SHRINKING 0
#endif

#if SHRINKING
#define SHRINKERS (SEGMENTS / CLUSTER)
#define PASS 16

struct Shrinking {
  char a[SHRINKERS][MOST * PARTS][2 * EIGHT_BYTES];
  uint4 b[EIGHTS * 8][2];  // of the first sixteen ranks
  float parts[SEGMENTS][PARTS][PASS][8];
  float sums[8][PARTS * MOST_RANK + 4];
  u64 told[2];  // a barrier, which knows how much of `parts` is there
};

__device__ __forceinline__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes to the same shared memory of another block of the cluster, and tells its barrier.
__device__ __forceinline__ void tell_block(int block, const void* at, const void* told, float x,
                                           float y) {
  u32 address = shared_address(at), barrier = shared_address(told);
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(barrier), "r"(block));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          address),
      "f"(x), "f"(y), "r"(barrier)
      : "memory");
}

struct Shrinker {
  const Arguments& a;
  Shrinking& shared;
  int rank, warp, first, count, lane;
  int matrix = 0, matrices = PARTS;  // those that the cluster has rows of
  int pass = 0;
  bool tells = false;

  // Asks for the first sixteen ranks; once per launch, before the weights.
  __device__ __forceinline__ void begin() {
    tells = warp / SHRINKERS == blockIdx.x % CLUSTER;
#if OUTPUT != GATED && !REPEATED
    int begin = blockIdx.x / CLUSTER * CLUSTER * EIGHTS * 8, end = begin + CLUSTER * EIGHTS * 8;
    matrix = matrix_of(a, min(begin, a.rows - 1));
    matrices = matrix_of(a, min(end, a.rows) - 1) - matrix + 1;
#endif
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(shared.told))
                   : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    expect();
    arrive_cluster();
    if (tells) ask_ranks();
    if (!REPEATED && warp == 0) ask_columns(blockIdx.x);
    end_copies();
  }

  // Let the barrier know how many bytes the next pass brings.
  __device__ __forceinline__ void expect() {
    if (threadIdx.x) return;
    int bytes = SEGMENTS * matrices * PASS * ((a.tokens + 1) / 2) * 8;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(
                     shared_address(shared.told)),
                 "r"(bytes)
                 : "memory");
  }

  // Ask for the rows of B that belong to a group.
  __device__ __forceinline__ void ask_columns(int group) {
    for (int i = lane; i < EIGHTS * 16; i += 32) {
      int eight = group * EIGHTS + i / 16, row = i / 2 % 8;
      int column = (OUTPUT == GATED ? eight / 2 : eight) * 8 + row;
      bool there = column < a.rows;
      if (!there) column = 0;
      if (OUTPUT == GATED) column += eight % 2 * a.rows;
      copy_ahead(shared_address(&shared.b[i / 2][i % 2]),
                 a.added.b + (long long)column * MOST_RANK + i % 2 * 8, there);
    }
  }

  // Ask for the sixteen ranks of a pass, all inputs of the warp's segment.
  __device__ __forceinline__ void ask_ranks() {
    for (int j = 0; j < count; ++j)
      for (int p = 0; p < matrices; ++p) {
        u32 stage = shared_address(shared.a[warp % SHRINKERS][j * PARTS + p]);
        long long row = (matrix + p) * MOST_RANK + pass * PASS;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Eight eight = {(const char*)(a.added.a + (row + 8 * i) * INPUTS), 8};
          copy_eight<INPUTS>(stage + i * EIGHT_BYTES, eight, first + j, lane);
        }
      }
  }

  __device__ __forceinline__ bool is_last() const { return (pass + 1) * PASS >= rank; }

  // Multiply block j of the segment by the ranks of a pass.
  __device__ __forceinline__ void multiply_ranks(float (&sums)[PARTS][4], const uint4 (&x)[2],
                                                 int j) {
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      if (p >= matrices) continue;
      const char* stage = shared.a[warp % SHRINKERS][j * PARTS + p];
      uint4 low[2], high[2];
      read_eight(stage, lane, low);
      read_eight(stage + EIGHT_BYTES, lane, high);
      multiply_block(sums[p], low, high, x);
    }
  }

  // Tell all blocks of the cluster what the segment gives.
  __device__ __forceinline__ void tell(const float (&sums)[PARTS][4]) {
    int g = lane / 4, token = lane % 4 * 2;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      if (p >= matrices || token >= a.tokens) continue;
#pragma unroll
      for (int i = 0; i < CLUSTER; ++i) {
        float(&parts)[PASS][8] = shared.parts[warp][p];
        tell_block(i, &parts[g][token], shared.told, sums[p][0], sums[p][1]);
        tell_block(i, &parts[g + 8][token], shared.told, sums[p][2], sums[p][3]);
      }
    }
    __syncwarp();
  }

  // Wait until all segments of a pass are told, and add them up in ascending order.
  __device__ __forceinline__ void add_segments() {
    u32 barrier = shared_address(shared.told), ready = 0;
    while (!ready)
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(ready)
          : "r"(barrier), "r"(pass & 1)
          : "memory");
    for (int i = threadIdx.x; i < PARTS * PASS * 8; i += blockDim.x) {
      int token = i % 8, r = i / 8 % PASS, p = i / (8 * PASS);
      if (token >= a.tokens || p >= matrices) continue;
      float sum = shared.parts[0][p][r][token];
#pragma unroll
      for (int s = 1; s < SEGMENTS; ++s) sum = __fadd_rn(sum, shared.parts[s][p][r][token]);
      shared.sums[token][p * MOST_RANK + pass * PASS + r] = sum;
    }
  }

  // The same, and then to the next ranks, when all blocks have done so.
  __device__ __forceinline__ void go_on() {
    add_segments();
    expect();
    arrive_cluster();
    ++pass;
    if (tells) {
      ask_ranks();
      end_copies();
      wait_copies<0>();
      __syncwarp();
    }
    wait_cluster();
  }

  // What is added to an item, whose first row is given.
  __device__ __forceinline__ float4 added(int item, int row) {
    AddedPlace place = added_place(a, row);
    int eight = item / 32 * 2, g = item % 32 / 4;
    int2 local = make_int2(eight * 8 + g, min(eight + 1, EIGHTS - 1) * 8 + g);
    // The rows of an eight that is not there may be another cluster's.
    if (EIGHTS % 2 && local.x == local.y) place.first.y = place.first.x;
    int before = matrix * MOST_RANK, from = 0;
    int2 first = make_int2(place.first.x - before, place.first.y - before);
    const float* x = shared.sums[min(g, a.tokens - 1)];
    Expansion expansion;
#if !REPEATED
    const u16* near[2] = {(const u16*)shared.b[local.x], (const u16*)shared.b[local.y]};
    expansion.add(x, near, first, place.apart(), 0, min(rank, PASS));
    from = PASS;
#endif
    const u16* b[2] = {a.added.b + (long long)place.column.x * MOST_RANK,
                       a.added.b + (long long)place.column.y * MOST_RANK};
    expansion.add(x, b, first, place.apart(), from, rank);
    return expansion.sum(place.apart());
  }
};
#endif
