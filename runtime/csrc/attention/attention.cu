#include "common/numbers.cuh"
#include "common/ring.cuh"
#include "common/tiles.cuh"
#include "attention/rotate.cuh"
#include "common/staged.cuh"
#include "attention/arguments.cuh"
#include "attention/block.cuh"
#include "attention/softmax.cuh"
#include "attention/scores.cuh"
#include "attention/rotation.cuh"
#include "attention/woven.cuh"
#include "attention/merge.cuh"
#include "attention/pairs.cuh"
#include "attention/cluster.cuh"
// Attention of the tokens of a step over a row's cache (docs/kernels.md, specified by
// attention_steps.py of its tests): flash attention (Dao, 2023) by splits of 64 positions and spans
// of four.
//
// The query rows of a KV head are its tokens' heads, token by token. A block has TILES tiles of 16
// of them, or of 8 where HALVES is 1; SHARE warps have one tile together: each computes the scores
// of its part of a split's positions, all exchange them, and each has its part of the columns of
// the values.
//
// FUSED: rotation and cache write happen here; SINGLE: a row has one token; LONE: it has several, and
// where it is short, a block the rows of one. TREE: tokens see each other by a packed mask. WHOLE: a block takes all
// positions; else the last block of a token merges what all have left in `partial`.

// A warp for each four heads of a token: queries go to `queries`, keys and values into the caches.
extern "C" __global__ void __launch_bounds__(THREADS) rotate(const __grid_constant__ Arguments a) {
  const int each = 4, groups = (HEADS + each - 1) / each;
  int at = blockIdx.x * WARPS + threadIdx.x / 32, token = at / groups, first = at % groups * each;
  if (token >= a.batch * a.seq_len) return;
  int row = token / a.seq_len, slot = first_slot(a, row) + token - row * a.seq_len;
  Angles angles;
  Gains q_gains, k_gains;
  angles.load(cosines(a, row, token), sines(a, row, token));
  q_gains.load(a.q_gain);
  k_gains.load(a.k_gain);
  wait_for_predecessors(Config::FOR_NODES);
  Head own[each];
  float sums[each];
#pragma unroll
  for (int k = 0; k < each; ++k)
    own[k].load(a.qkv + ((i64)token * HEADS + min(first + k, HEADS - 1)) * DIM);
#pragma unroll
  for (int k = 0; k < each; ++k) sums[k] = own[k].squares();
  if (a.q_gain) sum_of_warp(sums);
#pragma unroll
  for (int k = 0; k < each; ++k) {
    int head = first + k, kv_head = (head - QUERY_HEADS) % KV_HEADS;
    bool query = head < QUERY_HEADS, value = head >= QUERY_HEADS + KV_HEADS;
    if (head >= HEADS || (!query && slot >= a.kv_len)) break;
    if (!value) {
      if (a.q_gain) own[k].normalise(sums[k], Gains(query, q_gains, k_gains), a.eps);
      own[k].turn(angles);
    }
    i64 cached = (((i64)row * KV_HEADS + kv_head) * a.kv_len + slot) * DIM;
    if (query)
      own[k].store(a.queries + ((i64)token * QUERY_HEADS + head) * DIM, a.scale);
    else
      own[k].store((value ? a.values : a.keys) + cached, 1.0f);
  }
}

// Add a split to the span: its values times the powers, by pairs of eight columns.
__device__ void weigh(const Block& block, const Place& at, const Piece& piece,
                      const Powers& powers, Own& span) {
  u32 values = shared_address(block.shared.buffers[VALUES]) + at.lane % 16 * STRIDE +
               at.lane / 16 * 16 + at.share * OWN * 32;
  Merge merge[2] = {Merge(span.m[0], powers.m[0]),
                    Merge(span.m[HALVES - 1], powers.m[HALVES - 1])};
  float o[OWN][2][4] = {};
  if constexpr (WOVEN) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int first = piece.split * SPLIT + i * 16;
      if (!block.causal && first + 16 > block.start) {
        Woven(block, at, piece).weigh(powers.p[i], first, o);
        continue;
      }
#pragma unroll
      for (int n = 0; n < OWN; ++n)
        if (STEPS % SHARE == 0 || at.share * OWN + n < STEPS)
          weigh_sixteen(powers.p[i], values + i * 16 * STRIDE + n * 32, o[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < OWN; ++n) {
    if (STEPS % SHARE && at.share * OWN + n >= STEPS) break;
    if constexpr (!WOVEN) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weigh_sixteen(powers.p[i], values + i * 16 * STRIDE + n * 32, o[n]);
    }
#pragma unroll
    for (int c = 0; c < 2 * HALVES; ++c)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& sum = span.o[2 * n + k][c];
        sum = merge[c / 2].of(sum, o[n][k][c]);
      }
  }
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    span.m[half] = merge[half].top;
    span.l[half] = merge[half].of(span.l[half], powers.l[half]);
  }
}

// Do a block's items from this one on: `done` counts those of the token of this thread.
__device__ void attend_items(const Block& block, Piece piece, int position, int& done) {
  Shared& shared = block.shared;
  RotationOf<Config::FUSED>::Type rotation(block, piece, position);
  Place at(block);
  // Inputs that the step does not write.
  for (int value = 0; value < BUFFERS; ++value) {
    block.load(value, piece, 0, min(block.start, piece.seen));
    end_copies();
  }
  block.find(piece);
  if constexpr (Config::FUSED) {
    wait_for_predecessors((Config::SINGLE || Config::LONE) && Config::EARLY && block.a.batch == 1);
    rotation.run();
  } else {
    if (Config::TREE) __syncthreads();
    wait_for_predecessors();
    block.load_queries();
    if (piece.seen > block.start && piece.split * SPLIT + SPLIT > block.start)
      for (int value = 0; value < BUFFERS; ++value)
        block.load(value, piece, block.start, piece.seen);
    end_copies();
    wait_copies<0>();
    __syncthreads();
  }
  Queries queries;
  queries.load(shared.reused.queries, at.tile * 16 + at.lane % 16);
  Own span, whole;
  span.clear();
  whole.clear();
  while (true) {
    Piece next = block.behind(piece);
    float own[SCORED][4], s[8][4];
    wait_copies<BUFFERS - 1>();
    __syncthreads();
    block.find(next);
    score(block, at, queries, own);
    exchange(block, at, own, s);
    // The keys' place is free.
    const bool apart = WOVEN && !block.causal && piece.split * SPLIT + SPLIT > block.start;
    if constexpr (WOVEN) {
      Woven woven(block, at, piece);
      if (apart) {
        woven.find();
        woven.score(queries, s);
        woven.load_values();
      }
    }
    if (BUFFERS == 1)
      block.load(true, piece);
    else if (!apart)
      block.load(false, next);
    end_copies();
    int seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      seen[half] = at.seen(block, piece, half);
    Powers powers(s, seen);
    if (BUFFERS == 1 || apart)
      wait_copies<0>();
    else
      wait_copies<1>();
    __syncthreads();
    weigh(block, at, piece, powers, span);
    bool last = next.item >= block.items;
    if (!last) {
      __syncthreads();
      if (BUFFERS == 1 || apart) {
        block.load(false, next);
        end_copies();
      }
      if (BUFFERS == 2) {
        block.load(true, next);
        end_copies();
      }
    }
    if (Config::WHOLE ? last || next.split / SPAN != piece.split / SPAN : next.item != piece.item) {
      if (Config::WHOLE) {
        whole.add(span);
      } else if (block.units == 1) {
        finish(block, at, piece, span);
      } else {
        if constexpr (Config::CLUSTERED)
          if (is_together(block))
            return merge_in_cluster(block, at, piece.unit, block.units, span);
        leave(block, at, piece, span);
      }
      done += piece.token < 0 || piece.token == threadIdx.x;
      span.clear();
    }
    if (last) break;
    piece = next;
  }
  piece.token = -1;
  if (Config::WHOLE) finish(block, at, piece, whole);
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, RESIDENT)
    attend(const __grid_constant__ Arguments a) {
  __shared__ Shared shared;
  int position = 0, done = 0;
  if constexpr (Config::FUSED) {
    int own = Config::SINGLE ? 0 : min((int)threadIdx.x, a.seq_len - 1);
    position = a.positions[blockIdx.z % a.batch * a.seq_len + own];
  }
  Block block(a, shared);
  int item = block.item;
  if (item < block.step) {
    if (item >= block.items) return;
    if constexpr (Config::CLUSTERED)
      if (is_together(block)) expect_units(block, block.units);
    attend_items(block, block.first_of(item, 0), position, done);
  } else {
    if constexpr (PAIRED) {
      Pairs(block, item - block.step).run();
      if (threadIdx.x / WARPS == item - block.step) done = block.splits - block.apart;
    }
  }
  bool left = !Config::WHOLE && block.units > 1;
  if constexpr (Config::CLUSTERED) left = left && !is_together(block);
  if (left) merge(block, done);
}
