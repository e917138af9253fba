// The rotation of a step of nodes by each of its blocks. It comes behind what attention_nodes.cu
// defines of a block.

// Rotate queries of the block's tokens and keys of all, and round the values.
struct Rotation {
  const Arguments& a;
  int row, kv_head, node;  // of this warp
  Head queries[GROUP], keys[TURNS];
  float4 values[TURNS];

  __device__ i64 token(int k) const {
    return (i64)row * a.seq_len + min((int)threadIdx.x / 32 + k * WARPS, a.seq_len - 1);
  }
  __device__ const float* raw(i64 token, int head) const {
    return a.qkv + (token * HEADS + head) * DIM;
  }

  __device__ void load() {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < GROUP; ++h)
      queries[h].load(raw((i64)row * a.seq_len + node, kv_head * GROUP + h));
#pragma unroll
    for (int k = 0; k < TURNS; ++k) keys[k].load(raw(token(k), QUERY_HEADS + kv_head));
#pragma unroll
    for (int k = 0; k < TURNS; ++k)
      values[k] = __ldcg((const float4*)raw(token(k), QUERY_HEADS + KV_HEADS + kv_head) +
                         min(lane, DIM / 4 - 1));
  }

  __device__ void store(Shared& shared, const i64 (&positions)[TURNS], i64 position, int start) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, filled = start % SPLIT;
    i64 table = a.table_rows ? row : 0;
    Angles angles, of_keys[TURNS];
    Gains q_gains, k_gains;
    angles.load(angles_of(a.cos, position, table, a.table_rows),
                angles_of(a.sin, position, table, a.table_rows));
#pragma unroll
    for (int k = 0; k < TURNS; ++k)
      of_keys[k].load(angles_of(a.cos, positions[k], table, a.table_rows),
                      angles_of(a.sin, positions[k], table, a.table_rows));
    q_gains.load(a.q_gain);
    k_gains.load(a.k_gain);
    float sums[GROUP], of[TURNS];
#pragma unroll
    for (int h = 0; h < GROUP; ++h) sums[h] = queries[h].squares();
#pragma unroll
    for (int k = 0; k < TURNS; ++k) of[k] = keys[k].squares();
    if (a.q_gain) {
      sum_of_warp(sums);
      sum_of_warp(of);
    }
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
      if (a.q_gain) queries[h].normalise(sums[h], q_gains, a.eps);
      queries[h].turn(angles);
      queries[h].store((u16*)(shared.queries + (warp * GROUP + h) * STRIDE), a.scale);
    }
#pragma unroll
    for (int k = 0; k < TURNS; ++k) {
      int at = warp + k * WARPS;
      if (at >= a.seq_len) break;
      if (a.q_gain) keys[k].normalise(of[k], k_gains, a.eps);
      keys[k].turn(of_keys[k]);
      keys[k].store((u16*)(shared.keys + (filled + at) * STRIDE), 1.0f);
      uint2 value = make_uint2(pack(values[k].x, values[k].y), pack(values[k].z, values[k].w));
      if (lane < DIM / 4) *(uint2*)(shared.values + (filled + at) * STRIDE + lane * 8) = value;
      // The block's own tokens are written by it.
      if (k != (int)blockIdx.x || start + at >= a.kv_len) continue;
      i64 cached = (((i64)row * KV_HEADS + kv_head) * a.kv_len + start + at) * DIM;
      keys[k].store(a.keys + cached, 1.0f);
      if (lane < DIM / 4) *(uint2*)(a.values + cached + lane * 4) = value;
    }
  }
};
