// What becomes of sums: the output, or parts of them that the last block of a tile merges. It comes
// behind attention_scores.cuh.

typedef Sums<2 * OWN> Own;

__device__ float inverse(float l) { return l > 0.0f ? __frcp_rn(l) : 0.0f; }

// Where a row's heads go.
__device__ u16* output(const Block& block, int row) {
  i64 token = (i64)block.row * block.a.seq_len + row / GROUP;
  return block.a.out + (token * QUERY_HEADS + block.kv_head * GROUP + row % GROUP) * DIM;
}

__device__ void finish(const Block& block, const Place& at, const Own& whole) {
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    int row = at.first_row + at.lane / 4 + 8 * half;
    if (row >= block.a.seq_len * GROUP) continue;
    float share = inverse(whole.l[half]);
    u32* out = (u32*)output(block, row) + at.lane % 4;
#pragma unroll
    for (int n = 0; n < 2 * OWN; ++n) {
      int column = at.share * 2 * OWN + n;
      if (STEPS % SHARE && column >= PIECES) break;
      out[column * 4] = pack(__fmul_rn(whole.o[n][2 * half], share),
                                __fmul_rn(whole.o[n][2 * half + 1], share));
    }
  }
}

// The first of a unit's rows among the partial sums of all.
__device__ i64 partial_of(const Block& block, int unit) {
  i64 tile = (i64)blockIdx.z * KV_HEADS + block.kv_head;
  return (tile * block.a.units + unit) * min(ROWS, block.a.seq_len * GROUP);
}

__device__ void leave(const Block& block, const Place& at, int unit, const Own& span) {
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    int row = at.tile * 16 + at.lane / 4 + 8 * half;
    if (block.tile * ROWS + row >= block.a.seq_len * GROUP) continue;
    i64 to = partial_of(block, unit) + row;
#pragma unroll
    for (int n = 0; n < 2 * OWN; ++n) {
      int column = at.share * 2 * OWN + n;
      if (STEPS % SHARE && column >= PIECES) break;
      *(float2*)(block.a.partial + to * DIM + column * 8 + at.lane % 4 * 2) =
          make_float2(span.o[n][2 * half], span.o[n][2 * half + 1]);
    }
    if (at.share == 0 && at.lane % 4 == 0)
      block.a.sums[to] = make_float2(span.m[half], span.l[half]);
  }
}

// True for the last of `blocks` blocks of a tile that come here for its counter `which`; it sees
// what the others left.
__device__ bool is_last(const Block& block, int which, int blocks) {
  __shared__ bool last;
  int counters = 1 + (block.a.fine + SPAN - 1) / SPAN;
  u32* ticket = block.a.tickets + (blockIdx.z * KV_HEADS + block.kv_head) * counters + which;
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 before;
    // It serves the block, as barriers come around it.
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(ticket)
                 : "memory");
    last = before == blocks - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  return last;
}

// Four columns of a row of what was left, with the row's maximum and sum.
struct Left {
  float2 sum;
  float4 o;

  __device__ void clear() {
    sum = make_float2(MINUS_INFINITY, 0.0f);
    o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __device__ void load(const Arguments& a, i64 row, int quad) {
    sum = __ldcg(a.sums + row);
    o = __ldcg((const float4*)(a.partial + row * DIM) + quad);
  }
  __device__ void add(const Left& next) {
    Merge merge(sum.x, next.sum.x);
    sum = make_float2(merge.top, merge.of(sum.y, next.sum.y));
    o = make_float4(merge.of(o.x, next.o.x), merge.of(o.y, next.o.y), merge.of(o.z, next.o.z),
                    merge.of(o.w, next.o.w));
  }
  // Add up to SPAN units from `unit` on: one span of them, or so many spans.
  __device__ void add(const Arguments& a, i64 row, int quad, int unit, int units, int stored,
                      bool splits) {
    Left next[SPAN];
#pragma unroll
    for (int k = 0; k < SPAN; ++k) {
      next[k].clear();
      if (unit + k < units) next[k].load(a, row + (i64)(unit + k) * stored, quad);
    }
    if (splits) {
#pragma unroll
      for (int k = 1; k < SPAN; ++k) next[0].add(next[k]);
      add(next[0]);
    } else {
#pragma unroll
      for (int k = 0; k < SPAN; ++k) add(next[k]);
    }
  }
};

#define QUADS (DIM / 4)
// What a thread merges at a time.
#define ITEMS (DIM > 128 ? 2 : 4)

__device__ void finish(const Block& block, int row, int quad, const Left& whole) {
  float share = inverse(whole.sum.y);
  uint2 out = make_uint2(pack(__fmul_rn(whole.o.x, share), __fmul_rn(whole.o.y, share)),
                         pack(__fmul_rn(whole.o.z, share), __fmul_rn(whole.o.w, share)));
  ((uint2*)output(block, block.tile * ROWS + row))[quad] = out;
}

// Merge the units of a tile in ascending order: into spans if they are splits, those into the
// whole.
__device__ void merge(const Block& block, int begin, int units, bool splits) {
  const Arguments& a = block.a;
  int stored = min(ROWS, a.seq_len * GROUP);
  int items = min(ROWS, a.seq_len * GROUP - block.tile * ROWS) * QUADS;
  i64 first = partial_of(block, 0);
#if HALVES == 1
  // There are few rows: spans are merged side by side, then by one thread a row and quad.
  struct Spans {
    float4 o[THREADS];
    float2 sums[THREADS];
  };
  Spans* spans = (Spans*)block.shared.buffers;
  const int room = sizeof(block.shared.buffers) / sizeof(Spans), per = splits ? SPAN : 1;
  int count = (units + per - 1) / per;
  for (int pass = 0; pass < items; pass += THREADS) {
    int width = min(THREADS, items - pass), own = pass + threadIdx.x;
    Left whole;
    whole.clear();
    for (int done = 0; done < count; done += room) {
      int now = min(room, count - done);
#pragma unroll 2
      for (int i = threadIdx.x; i < now * width; i += THREADS) {
        int span = i / width, item = pass + i % width, unit = (done + span) * per;
        Left left;
        left.clear();
        left.add(a, first + item / QUADS, item % QUADS, unit, min(units, unit + per), stored,
                 true);
        spans[span].o[i % width] = left.o;
        spans[span].sums[i % width] = left.sum;
      }
      __syncthreads();
      if (own < items)
        for (int span = 0; span < now; ++span) {
          Left next;
          next.o = spans[span].o[threadIdx.x];
          next.sum = spans[span].sums[threadIdx.x];
          whole.add(next);
        }
      __syncthreads();
    }
    if (own < items) finish(block, own / QUADS, own % QUADS, whole);
  }
#else
#pragma unroll ITEMS
  for (int i = threadIdx.x; i < items; i += THREADS) {
    Left whole;
    whole.clear();
    for (int unit = begin; unit < units; unit += SPAN)
      whole.add(a, first + i / QUADS, i % QUADS, unit, units, stored, splits);
    finish(block, i / QUADS, i % QUADS, whole);
  }
#endif
}

// Merge the splits of a span, as a unit behind all splits.
__device__ void merge_span(const Block& block, int span, int units) {
  const Arguments& a = block.a;
  int stored = min(ROWS, a.seq_len * GROUP);
  int items = min(ROWS, a.seq_len * GROUP - block.tile * ROWS) * QUADS;
  i64 first = partial_of(block, 0), to = partial_of(block, a.fine + span);
#pragma unroll ITEMS
  for (int i = threadIdx.x; i < items; i += THREADS) {
    Left left;
    left.clear();
    left.add(a, first + i / QUADS, i % QUADS, span * SPAN, min(units, span * SPAN + SPAN), stored,
             true);
    i64 row = to + i / QUADS;
    ((float4*)(a.partial + row * DIM))[i % QUADS] = left.o;
    if (i % QUADS == 0) a.sums[row] = left.sum;
  }
}
