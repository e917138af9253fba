// Epilogue of sums: the output, or parts of them that the last block of a tile merges. It comes
// behind scores.cuh.

typedef Sums<2 * OWN> Own;

// Address of a row's heads in the output.
__device__ u16* output(const Block& block, int row) {
  i64 token = (i64)block.row * block.a.seq_len + row / GROUP;
  return block.a.out + (token * QUERY_HEADS + block.kv_head * GROUP + row % GROUP) * DIM;
}

// The output of a piece's rows.
__device__ void finish(const Block& block, const Place& at, const Piece& piece, const Own& whole) {
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    if (!at.has(piece, half)) continue;
    float share = inverse(whole.l[half]);
    int row = block.tile * block.rows() + at.first_row + at.lane / 4 + 8 * half;
    if constexpr (Config::STAGED) {
      // Of four columns of eight a lane has what stages have side by side.
      static_assert(!Config::STAGED || (2 * OWN % 4 == 0 && STEPS % SHARE == 0 && DIM % 32 == 0),
                    "whole half blocks");
      i64 token = (i64)block.row * block.a.seq_len + row / GROUP;
      int first = (block.kv_head * GROUP + row % GROUP) * (DIM / 2) + at.share * OWN * 8;
      int tokens = block.a.batch * block.a.seq_len;
#pragma unroll
      for (int n = 0; n < 2 * OWN; n += 4) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = pack(__fmul_rn(whole.o[n + i][2 * half], share),
                          __fmul_rn(whole.o[n + i][2 * half + 1], share));
        *(uint4*)((u32*)block.a.out + staged_word(token, tokens, first + n * 4 + at.lane % 4)) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    } else {
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
}

// Rows of a unit that are left.
__device__ int stored_rows(const Block& block) { return min(block.rows(), block.a.seq_len * GROUP); }

// The first of a tile's rows among the partial sums of all.
__device__ i64 first_partial(const Block& block) {
  i64 before = (i64)block.tiles_before() * min(ROWS, block.a.seq_len * GROUP);
  return (before + block.tile * stored_rows(block)) * block.a.units;
}

// Leave a piece's rows as those of its unit.
__device__ void leave(const Block& block, const Place& at, const Piece& piece, const Own& span) {
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    if (!at.has(piece, half)) continue;
    i64 to = first_partial(block) + piece.unit * stored_rows(block) + at.first_row + at.lane / 4 +
             8 * half;
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

// The tokens, as bits, of which this block has done the last item; it sees what others left. Each
// thread says how many it has done of its token. Tokens that have all items in common have one
// counter together.
__device__ u32 completed(const Block& block, int done) {
  __shared__ u32 tokens;
  int own = threadIdx.x;
  __syncthreads();
  if (own < 32) {
    bool last = false;
    if (done && own < (block.causal ? 1 : block.tokens)) {
      u32* ticket = block.a.tickets + block.tiles_before() * TOKENS +
                    block.tile * (Config::LONE && block.lone ? 1 : TOKENS) + own;
      u32 before;
      // It serves the block, as barriers come around it.
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                   : "=r"(before)
                   : "l"(ticket), "r"(done)
                   : "memory");
      last = before + done == block.common_items() + block.splits - block.apart;
      if (last) *ticket = 0;
    }
    u32 bits = __ballot_sync(~0u, last);
    if (own == 0) tokens = bits && block.causal ? ~0u >> (32 - block.tokens) : bits;
  }
  __syncthreads();
  return tokens;
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
};

// Sums that were left of a row's units from `unit` on, before `end`.
__device__ void load_units(const Block& block, Left (&next)[SPAN], i64 row, int quad, int unit,
                           int end, int stored) {
#pragma unroll
  for (int k = 0; k < SPAN; ++k) {
    next[k].clear();
    if (unit + k < end) next[k].load(block.a, row + (i64)(unit + k) * stored, quad);
  }
}

constexpr int QUADS = DIM / 4;

__device__ void finish(const Block& block, int row, int quad, const Left& whole) {
  float share = inverse(whole.sum.y);
  uint2 out = make_uint2(pack(__fmul_rn(whole.o.x, share), __fmul_rn(whole.o.y, share)),
                         pack(__fmul_rn(whole.o.z, share), __fmul_rn(whole.o.w, share)));
  ((uint2*)output(block, block.tile * block.rows() + row))[quad] = out;
}

// Merge what was left of the tile's rows [first, end) in ascending order: splits into their spans,
// side by side, and spans into the whole.
__device__ void merge_rows(const Block& block, int first, int end) {
  const int room = sizeof(block.shared.buffers) / (sizeof(float4) + sizeof(float2));
  float4* sums_of_values = (float4*)block.shared.buffers;
  float2* sums = (float2*)(sums_of_values + room);
  int stored = stored_rows(block), items = (end - first) * QUADS, spans = block.spans;
  int cut = (block.units - spans + SPAN - 1) / SPAN;  // spans of which each split is a unit
  int width = min(items, room / max(1, cut));
  i64 row = first_partial(block) + first;
  for (int pass = 0; pass < items; pass += width) {
    int now = min(width, items - pass);
#pragma unroll 2
    for (int i = threadIdx.x; i < cut * now; i += THREADS) {
      int item = pass + i % now, unit = spans + i / now * SPAN;
      Left span[SPAN];
      load_units(block, span, row + item / QUADS, item % QUADS, unit, block.units, stored);
#pragma unroll
      for (int k = 1; k < SPAN; ++k) span[0].add(span[k]);
      sums_of_values[i] = span[0].o;
      sums[i] = span[0].sum;
    }
    __syncthreads();
#pragma unroll 2
    for (int i = threadIdx.x; i < now; i += THREADS) {
      int item = pass + i;
      Left whole;
      whole.clear();
      for (int unit = 0; unit < spans; unit += SPAN) {
        Left next[SPAN];
        load_units(block, next, row + item / QUADS, item % QUADS, unit, spans, stored);
#pragma unroll
        for (int k = 0; k < SPAN; ++k) whole.add(next[k]);
      }
      for (int span = 0; span < cut; ++span) {
        Left next;
        next.o = sums_of_values[span * now + i];
        next.sum = sums[span * now + i];
        whole.add(next);
      }
      finish(block, first + item / QUADS, item % QUADS, whole);
    }
    __syncthreads();
  }
}

// Merge what was left of the tokens of which this block has done the last item.
__device__ void merge(const Block& block, int done) {
  for (u32 tokens = completed(block, done); tokens;) {
    int first = __ffs(tokens) - 1, end = first + __clz(__brev(~(tokens >> first)));
    merge_rows(block, block.row_of(first), block.row_of(end));
    tokens = end < 32 ? tokens >> end << end : 0;
  }
}
