#include "numbers.cuh"
#include "ring.cuh"
#include "tiles.cuh"
#include "rotate.cuh"
#include "softmax.cuh"
#include "attention_block.cuh"
#include "attention_scores.cuh"
#include "attention_path.cuh"
#include "attention_merge.cuh"
#include "attention_cluster.cuh"
// Attention of the tokens of a step over a row's cache (docs/kernels.md, specified by
// forms_attention.py): flash attention (Dao, 2023) by splits of 64 positions and spans of four.
//
// The query rows of a KV head are its tokens' heads, token by token. A block has TILES tiles of 16
// of them; SHARE warps have one tile together: each computes the scores of its part of a split's
// positions, all exchange them, and each has its part of the columns of the values.
//
// FUSED: a row's tokens are one tile, whose rotation and cache write happen here; SINGLE: there is
// one of them. HALVES is 1 where a tile has at most 8 rows. TREE: tokens see each other by a packed
// mask. WHOLE: a block takes all positions; else a block takes *units* of them, splits or spans,
// and the last block of a tile merges what all have left in `partial`.

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
  wait_for_predecessors();
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

// Add the product of powers and values at 16 positions, all of which have the same slots for all.
__device__ void weigh_common(const u32 (&p)[4], u32 values, int n, float (&o)[2][4]) {
  u32 b[4];
  load_turned_tiles(b, values + n * 32);
  multiply(o[0], p, b[0], b[1]);
  multiply(o[1], p, b[2], b[3]);
}

// Add a split to the span: its values times the powers, by pairs of eight columns. Some positions
// of one that is APART have slots of their own for each token.
template <bool APART>
__device__ void weigh(const Block& block, const Place& at, const Path& path, int split,
                      int buffer, const Powers& powers, Own& span) {
  u32 values = shared_address(block.shared.buffers[buffer]) + at.lane % 16 * STRIDE +
               at.lane / 16 * 16 + at.share * OWN * 32;
  Merge merge[2] = {Merge(span.m[0], powers.m[0]),
                    Merge(span.m[HALVES - 1], powers.m[HALVES - 1])};
  float o[OWN][2][4] = {};
  if (APART)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int first = split * SPLIT + i * 16;
      if (first + 16 > block.start) {
        path.weigh(powers.p[i], first, o);
        continue;
      }
#pragma unroll
      for (int n = 0; n < OWN; ++n) {
        if (STEPS % SHARE && at.share * OWN + n >= STEPS) break;
        weigh_common(powers.p[i], values + i * 16 * STRIDE, n, o[n]);
      }
    }
#pragma unroll
  for (int n = 0; n < OWN; ++n) {
    if (STEPS % SHARE && at.share * OWN + n >= STEPS) break;
    if (!APART)
#pragma unroll
      for (int i = 0; i < 4; ++i) weigh_common(powers.p[i], values + i * 16 * STRIDE, n, o[n]);
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

#if FUSED
// Rotate the queries of this row and KV head into shared memory, and if this block sees a position
// of the step, the new keys and values too, into the caches. Every such block writes all of them.
// A single token's are put into `newest` and, if it is there, the split in shared memory as well.
struct Rotation {
  const Block& block;
  bool newest;
  int splits[2];  // that are in shared memory already

  __device__ Rotation(const Block& block, bool newest, int first, int second)
      : block(block), newest(newest), splits{first, second} {}

  __device__ void run(const Angles& first, const Gains& q_gains, const Gains& k_gains) const {
    const Arguments& a = block.a;
    int queries = a.seq_len * GROUP, all = queries + (newest ? 2 * a.seq_len : 0);
    for (int begin = threadIdx.x / 32; begin < all; begin += WARPS * BATCH) {
      Head own[BATCH];
      Angles angles[BATCH];
      float sums[BATCH];
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {
        // The last one again where there are no more.
        int i = min(begin + k * WARPS, all - 1);
        bool query = i < queries;
        int token = query ? i / GROUP : (i - queries) / 2;
        int head = query ? block.kv_head * GROUP + i % GROUP
                         : QUERY_HEADS + (i - queries) % 2 * KV_HEADS + block.kv_head;
        own[k].load(a.qkv + (((i64)block.row * a.seq_len + token) * HEADS + head) * DIM);
        angles[k] = first;
#if !SINGLE
        int table = a.table_rows ? block.row : 0;
        angles[k].load(angles_of(a.cos, block.shared.positions[token], table, a.table_rows),
                       angles_of(a.sin, block.shared.positions[token], table, a.table_rows));
#endif
      }
#pragma unroll
      for (int k = 0; k < BATCH; ++k) sums[k] = own[k].squares();
      if (a.q_gain) sum_of_warp(sums);
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {
        int i = begin + k * WARPS;
        if (i >= all) break;
        bool query = i < queries, value = !query && (i - queries) % 2;
        if (!value) {
          if (a.q_gain) own[k].normalise(sums[k], Gains(query, q_gains, k_gains), a.eps);
          own[k].turn(angles[k]);
        }
        if (query)
          own[k].store((u16*)(block.shared.queries + i * STRIDE), a.scale);
        else
          store(own[k], block.start + (i - queries) / 2, value);
      }
    }
    __syncthreads();
  }

  __device__ void store(const Head& own, int slot, bool value) const {
    if (slot >= block.a.kv_len) return;
    own.store((u16*)(value ? block.values : block.keys) + (i64)slot * DIM, 1.0f);
#if SINGLE
    own.store(block.shared.newest[value], 1.0f);
    if (BUFFERS == 1 && value) return;
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage)
      if (slot / SPLIT == splits[stage])
        own.store((u16*)(block.shared.buffers[stage * BUFFERS + value] + slot % SPLIT * STRIDE),
                  1.0f);
#endif
  }
};
#endif

extern "C" __global__ void
#if CLUSTERED
__cluster_dims__(SPAN)
#endif
__launch_bounds__(THREADS, RESIDENT) attend(const __grid_constant__ Arguments a) {
#if STAGES > 1
  extern __shared__ __align__(16) unsigned char room[];
  static_assert(sizeof(Shared) == SHARED_BYTES, "what the block is given");
  Shared& shared = *(Shared*)room;
#else
  __shared__ Shared shared;
#endif
  Block block(a, shared);
  int splits = max(1, (block.most + SPLIT - 1) / SPLIT);
  // A unit has so many splits, as a power of two.
  int power = !WHOLE && splits <= a.fine ? 0 : 2, per = 1 << power;
  int units = (splits + per - 1) >> power, unit = blockIdx.x, first = unit << power;
  if (unit >= units) return;
#if CLUSTERED
  if (is_together(units)) expect_units(block, units);
#endif
  Place at(block);
  // The split that this block has behind another one; -1 for none.
  auto behind = [&](int split) {
    int unit = (split >> power) + gridDim.x;
    if (split < 0) return -1;
    if ((split + 1) % SPAN && power && split + 1 < splits) return split + 1;
    return unit < units ? unit << power : -1;
  };
  // What the step does not write.
  int filled = min(block.start, block.common);
#pragma unroll
  for (int stage = 0, split = first; stage < STAGES; ++stage, split = behind(split))
#pragma unroll
    for (int value = 0; value < BUFFERS; ++value) {
      if (split >= 0)
        block.load(stage * BUFFERS + value, value ? block.values : block.keys, split, 0, filled,
                   block.common);
      if (STAGES == 1 || value == VALUES) end_copies();
    }
  // Paths at the first of the positions that may differ.
  int found = block.start / SPLIT;
  if (TREE && !block.causal) Path(block, at, found).find();
  Queries queries;
  int last = unit + (units - 1 - unit) / (int)gridDim.x * (int)gridDim.x;
  // What the step writes is seen by the units from here on.
  bool sees = block.start < a.kv_len && last >= block.start / SPLIT >> power;
#if FUSED
  Angles angles;
  Gains q_gains, k_gains;
  q_gains.load(a.q_gain);
  k_gains.load(a.k_gain);
#if SINGLE
  angles.load(cosines(a, block.row, block.row), sines(a, block.row, block.row));
#else
  if (threadIdx.x < a.seq_len)
    shared.positions[threadIdx.x] = a.positions[block.row * a.seq_len + threadIdx.x];
  __syncthreads();
#endif
  wait_for_predecessors(SINGLE && EARLY && a.batch == 1);
  Rotation(block, sees, first, behind(first)).run(angles, q_gains, k_gains);
  queries.load(shared.queries);
#else
  wait_for_predecessors();
  queries.load(block, at.first_row);
#endif
  bool fresh = !SINGLE && sees && block.common > block.start &&
               first * SPLIT + SPLIT > block.start;
  if (fresh) {
    block.load(0, block.keys, first, block.start, block.common, a.kv_len + SPLIT);
    if (BUFFERS == 2)
      block.load(1, block.values, first, block.start, block.common, a.kv_len + SPLIT);
    end_copies();
  }
  // Many rows of many splits are merged by the last block of each span, then by that of all.
  bool by_spans = HALVES == 2 && power == 0 && units > SPAN;
  Own span, whole;
  whole.clear();
  int stage = 0;
  for (; unit < units; unit += gridDim.x) {
    int end = min(splits, unit * per + per);
    span.clear();
    for (int split = unit * per; split < end; ++split) {
      int next = behind(split), buffer = stage * BUFFERS;
      bool apart = TREE && !block.causal && split * SPLIT + SPLIT > block.start;
      Path path(block, at, split);
      float own[SCORED][4], s[8][4];
      if (fresh || BUFFERS * STAGES == 1)
        wait_copies<0>();
      else
        wait_copies<1>();
      fresh = false;
      __syncthreads();
      score(block, at, queries, buffer, own);
      exchange(block, at, own, s);
      // It ends with all that was asked for.
      if (apart) {
        if (split != found) path.find();
        path.score(queries, s);
      }
      if (STAGES == 1) {
        // The keys' place is free.
        if (BUFFERS == 1)
          block.load(true, split, 0);
        else if (apart)
          path.load_values();
        else
          block.load(false, next, 0);
        end_copies();
      }
      int seen[2] = {at.seen[0] - split * SPLIT, at.seen[1] - split * SPLIT};
      Powers powers(s, seen);
      if (STAGES == 1) {
        if (apart || BUFFERS == 1)
          wait_copies<0>();
        else
          wait_copies<1>();
        __syncthreads();
      }
      if (apart)
        weigh<true>(block, at, path, split, buffer + VALUES, powers, span);
      else
        weigh<false>(block, at, path, split, buffer + VALUES, powers, span);
      __syncthreads();
      if (STAGES > 1) {
        int following = behind(next);
        block.load(false, following, stage);
        block.load(true, following, stage);
        stage = 1 - stage;
      } else {
        if (apart || BUFFERS == 1) {
          block.load(false, next, 0);
          end_copies();
        }
        if (BUFFERS == 2) block.load(true, next, 0);
      }
      if (BUFFERS == 2) end_copies();
    }
    if (WHOLE) {
      whole.add(span);
      continue;
    }
    if (units == 1) return finish(block, at, span);
#if CLUSTERED
    if (is_together(units)) return merge_in_cluster(block, at, unit, units, span);
#endif
    leave(block, at, unit, span);
    if (!by_spans) continue;
    int own = unit / SPAN, spans = (units + SPAN - 1) / SPAN;
    if (!is_last(block, 1 + own, min(SPAN, units - own * SPAN))) continue;
    merge_span(block, own, units);
    if (is_last(block, 0, spans)) merge(block, a.fine, a.fine + spans, false);
  }
  if (WHOLE)
    finish(block, at, whole);
  else if (!by_spans && is_last(block, 0, min(units, (int)gridDim.x)))
    merge(block, 0, units, power == 0);
}
