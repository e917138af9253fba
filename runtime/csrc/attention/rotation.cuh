// The rotation of a step's heads by the blocks of attention. Include behind block.cuh.

// Rotate the queries that a block needs into shared memory, and into the caches the keys and values
// of the step that it sees: every block that needs them writes the same. Those of its first piece
// are put where that is in shared memory, and those of a single token into `newest` as well.
struct Rotation {
  const Block& block;
  int split;           // of the first piece
  int first, queries;  // rows of the tile
  int fresh;           // tokens of the step
  Angles angles;       // SINGLE
  Gains q_gains, k_gains;

  // No kernel of the graph writes what is read here; `position` is that of this thread's token.
  __device__ Rotation(const Block& block, const Piece& piece, int position)
      : block(block), split(piece.split) {
    const Arguments& a = block.a;
    if constexpr (Config::SINGLE) {
      int table = a.table_rows ? block.row : 0;
      angles.load(angles_of(a.cos, position, table, a.table_rows),
                  angles_of(a.sin, position, table, a.table_rows));
    }
    q_gains.load(a.q_gain);
    k_gains.load(a.k_gain);
    int end = block.tokens;
    first = 0;
    u32 needed = needs(piece.item);
    if (ALONE && piece.token >= 0 && piece.item + block.step >= block.items) {
      first = block.row_of(piece.token);
      end = piece.token + 1;
    }
    queries = block.row_of(end) - first;
    fresh = __popc(needed);
    if constexpr (Config::SINGLE) return;
    int own = threadIdx.x;
    if (own < a.seq_len) {
      u32 seen = ALONE && piece.token >= 0 ? *block.mask_of(piece.token) : ~0u;
      u32 before = (1u << own) - 1;
      block.shared.few.positions[own] = position;
      if (needed >> own & 1) {
        int i = __popc(needed & before);
        block.shared.few.fresh[i] = own;
        block.shared.few.places[i] =
            seen >> own & 1 ? block.start + __popc(seen & before) - split * SPLIT : -1;
      }
    }
    __syncthreads();
  }

  // The tokens of the step whose keys and values are needed by this item and the block's further
  // ones, or have to be written by them, as bits.
  __device__ u32 needs(int item) const {
    int step = block.step, behind = block.items - 1 - item;
    if (block.causal) {
      int end = block.first_of(item + behind / step * step, 0).end;
      bool sees = block.start < block.a.kv_len && end * SPLIT > block.start;
      return sees ? (1u << (block.first_token + block.tokens)) - 1 : 0;
    }
    u32 needed = 0;
    if constexpr (ALONE) {
      item += max(0, block.common_items() - item + step - 1) / step * step;
      for (; item < block.items; item += step) {
        int token = block.first_of(item, 0).token;
        needed |= *block.mask_of(token) | 1u << (block.first_token + token);
      }
    }
    return needed;
  }

  __device__ void run() const {
    if (Config::LONE && queries + 2 * fresh <= 2 * WARPS)
      rotate_by<2>();
    else
      rotate_by<BATCH>();
  }

  // With so many heads of a warp at a time.
  template <int COUNT>
  __device__ void rotate_by() const {
    const Arguments& a = block.a;
    int all = queries + 2 * fresh;
    for (int begin = threadIdx.x / 32; begin < all; begin += WARPS * COUNT) {
      Head own[COUNT];
      Angles by[COUNT];
      float sums[COUNT];
#pragma unroll
      for (int k = 0; k < COUNT; ++k) {
        // The last one again where there are no more.
        int i = min(begin + k * WARPS, all - 1), token = 0, head;
        if (i < queries) {
          int row = block.tile * block.rows() + first + i;
          token = row / GROUP;
          head = block.kv_head * GROUP + row % GROUP;
        } else {
          if constexpr (!Config::SINGLE) token = block.shared.few.fresh[(i - queries) / 2];
          head = QUERY_HEADS + (i - queries) % 2 * KV_HEADS + block.kv_head;
        }
        own[k].load(a.qkv + (((i64)block.row * a.seq_len + token) * HEADS + head) * DIM);
        by[k] = angles;
        if constexpr (!Config::SINGLE) {
          int table = a.table_rows ? block.row : 0, position = block.shared.few.positions[token];
          by[k].load(angles_of(a.cos, position, table, a.table_rows),
                     angles_of(a.sin, position, table, a.table_rows));
        }
      }
#pragma unroll
      for (int k = 0; k < COUNT; ++k) sums[k] = own[k].squares();
      if (a.q_gain) sum_of_warp(sums);
#pragma unroll
      for (int k = 0; k < COUNT; ++k) {
        int i = begin + k * WARPS;
        if (i >= all) break;
        bool query = i < queries, value = !query && (i - queries) % 2;
        if (!value) {
          if (a.q_gain) own[k].normalise(sums[k], Gains(query, q_gains, k_gains), a.eps);
          own[k].turn(by[k]);
        }
        if (query)
          own[k].store((u16*)(block.shared.reused.queries + (first + i) * STRIDE), a.scale);
        else
          store(own[k], (i - queries) / 2, value);
      }
    }
    __syncthreads();
  }

  // Key or value of the i-th of the tokens that are needed.
  __device__ void store(const Head& own, int i, bool value) const {
    int slot = block.start, place = slot - split * SPLIT;
    if constexpr (Config::SINGLE) {
      own.store(block.shared.single.newest[value], 1.0f);
    } else {
      slot += block.shared.few.fresh[i];
      place = block.shared.few.places[i];
    }
    if (slot < block.a.kv_len)
      own.store((value ? block.values : block.keys) + (i64)slot * DIM, 1.0f);
    if ((BUFFERS == 2 || !value) && place >= 0 && place < SPLIT)
      own.store((u16*)(block.shared.buffers[value ? VALUES : 0] + place * STRIDE), 1.0f);
  }
};

// Queries that other blocks have rotated.
struct NoRotation {
  __device__ NoRotation(const Block&, const Piece&, int) {}
  __device__ void run() const {}
};

template <bool HERE>
struct RotationOf {
  typedef Rotation Type;
};
template <>
struct RotationOf<false> {
  typedef NoRotation Type;
};
