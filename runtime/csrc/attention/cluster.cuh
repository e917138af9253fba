// Merge of a token's only span by the blocks that have a split of it each, from compute capability
// 9.0 on: they are a cluster, and send their sums to the first, which waits for so many bytes. A
// fence would wait for all else that the multiprocessor has asked for, as the next product's
// weights. Include behind merge.cuh.

__device__ bool is_together(const Block& block) {
  return (Config::SINGLE || block.lone) && block.units > 1 && block.units <= SPAN && block.spans == 0;
}

// Say how much will come, before this block waits for its predecessors.
__device__ void expect_units(const Block& block, int units) {
  if (blockIdx.x % SPAN == 0 && threadIdx.x == 0) {
    u32 arrived = shared_address(&block.shared.cluster.arrived);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrived) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived),
                 "r"((units - 1) * GROUP * (DIM * 4 + 8))
                 : "memory");
  }
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

// Two numbers into the first block of the cluster, which counts their bytes.
__device__ void send(const void* to, u32 arrived, float first, float second) {
  u32 place;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(place) : "r"(shared_address(to)));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          place),
      "f"(first), "f"(second), "r"(arrived)
      : "memory");
}

// Send a unit's sums, or merge those of all into the output.
__device__ void merge_in_cluster(const Block& block, const Place& at, int unit, int units,
                                 const Own& span) {
  asm volatile("barrier.cluster.wait;" ::: "memory");
  // The keys of a block's only split are not read any more.
  Kept& own = unit ? block.shared.cluster.kept[unit - 1] : *(Kept*)block.shared.buffers;
  u32 arrived = shared_address(&block.shared.cluster.arrived), theirs;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(theirs) : "r"(arrived));
  auto leave = [&](float* to, float first, float second) {
    if (unit)
      send(to, theirs, first, second);
    else
      *(float2*)to = make_float2(first, second);
  };
  int row = at.lane / 4;
  if (row < GROUP) {
#pragma unroll
    for (int n = 0; n < 2 * OWN; ++n) {
      int column = at.share * 2 * OWN + n;
      if (STEPS % SHARE && column >= PIECES) break;
      leave(&own.o[row][column * 8 + at.lane % 4 * 2], span.o[n][0], span.o[n][1]);
    }
    if (at.share == 0 && at.lane % 4 == 0) leave(own.sums[row], span.m[0], span.l[0]);
  }
  if (unit) return;
  __syncthreads();
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n"
      "@!p bra again;\n}" ::"r"(arrived)
      : "memory");
  for (int i = threadIdx.x; i < GROUP * QUADS; i += THREADS) {
    Left next[SPAN];
#pragma unroll
    for (int k = 0; k < SPAN; ++k) {
      next[k].clear();
      if (k >= units) continue;
      const Kept& kept = k ? block.shared.cluster.kept[k - 1] : own;
      next[k].sum = *(const float2*)kept.sums[i / QUADS];
      next[k].o = *(const float4*)&kept.o[i / QUADS][i % QUADS * 4];
    }
#pragma unroll
    for (int k = 1; k < SPAN; ++k) next[0].add(next[k]);
    finish(block, i / QUADS, i % QUADS, next[0]);
  }
}
