// Splits from a row's start on in whole steps of trees, for all tokens of the block together. It
// comes behind scores.cuh.

// Scores are computed for the places of the tree, by windows of 64, and taken from there by
// position. Products with the values are made for one token of a tile after the other, of its own
// values and with powers of zero in the rows of others, which change no sum of finite values. One that
// is not finite makes the others of its tile so too (0 * inf), of the same row of the batch alone.
struct Woven {
  const Block& block;
  const Place& at;
  const Piece& piece;
  int split;
  bool near;  // the tree's values are in buffer 0, else they are read where they are cached
  int low, high;

  __device__ Woven(const Block& block, const Place& at, const Piece& piece)
      : block(block), at(at), piece(piece), split(piece.split), near(block.a.seq_len <= NEAR) {
    int first = block.tile * ROWS + at.first_row;
    low = first / GROUP - block.first_token;
    high = min(block.tokens, (first + 15) / GROUP - block.first_token + 1);
  }

  // Places in the tree of the block's tokens at a split's positions; a barrier must follow.
  __device__ void find() const {
    const Arguments& a = block.a;
    int own = threadIdx.x, position = block.start - split * SPLIT;
    if (own < block.tokens) {
      const u32* mask = block.mask_of(own);
      for (int i = 0; i < block.words(); ++i)
        for (u32 bits = mask[i]; bits; bits &= bits - 1, ++position)
          if (position >= 0 && position < SPLIT)
            block.shared.tree.woven[own][position] =
                min(i * 32 + __ffs(bits) - 1, a.kv_len - 1 - block.start);
    }
  }

  // Bring keys or values of up to 64 places of the tree into buffer 0.
  __device__ void load(const u16* cache, int window) const {
    u32 to = shared_address(block.shared.buffers[0]);
    int nodes = min(min(block.a.seq_len, block.a.kv_len - block.start) - window, SPLIT);
    const u16* from = cache + ((i64)block.start + window) * DIM;
#pragma unroll 4
    for (int i = threadIdx.x; i < nodes * PIECES; i += THREADS)
      copy_all(to + i / PIECES * STRIDE + i % PIECES * 16, from + i * 8);
  }

  // Scores of positions from the row's start on. Buffer 0 is not read any more afterwards.
  __device__ void score(const Queries& queries, float (&s)[8][4]) const {
    for (int window = 0; window < block.a.seq_len; window += SPLIT) {
      float own[SCORED][4];
      load(block.keys, window);
      end_copies();
      wait_copies<0>();
      __syncthreads();
      ::score(block, at, queries, own);
      publish(block, at, own);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (split * SPLIT + j * 8 + 8 <= block.start) continue;
#pragma unroll
        for (int c = 0; c < 2 * HALVES; ++c) {
          int place = j * 8 + at.lane % 4 * 2 + c % 2, position = split * SPLIT + place;
          if (position < block.start || place >= at.seen(block, piece, c / 2)) continue;
          int node = block.shared.tree.woven[at.token[c / 2]][place] - window;
          if (node >= 0 && node < SPLIT)
            s[j][c] = block.shared.reused.of.scores[at.tile][at.lane / 4 + 8 * (c / 2)][node];
        }
      }
    }
  }

  // Bring the tree's values, if they are to be in shared memory.
  __device__ void load_values() const {
    if (near) load(block.values, 0);
  }

  // Add the product of powers and values at 16 positions from `first` on. Tokens come some at a
  // time, so that one's values are on their way while another's are multiplied.
  __device__ void weigh(const u32 (&p)[4], int first, float (&o)[OWN][2][4]) const {
    const int some = SHARE == 4 && DIM <= 128 ? 4 : 2;
    int column = at.share * OWN * 32 + at.lane / 16 * 16;
    for (int begin = low; begin < high; begin += some) {
      u32 rows[some];
      int slots[some];
      bool there[some];
#pragma unroll
      for (int k = 0; k < some; ++k) {
        int token = min(begin + k, high - 1), seen = block.shared.tokens.seen[token];
        there[k] = begin + k < high && first < seen;
        int place = min(first + at.lane % 16, seen - 1) - split * SPLIT;
        bool own = there[k] && split * SPLIT + place >= block.start;
        int node = own ? block.shared.tree.woven[token][place] : 0;
        place = there[k] ? place : 0;
        rows[k] = shared_address(block.shared.buffers[own ? 0 : VALUES]) +
                  (own ? node : place) * STRIDE + column;
        slots[k] = own ? block.start + node : there[k] ? split * SPLIT + place : 0;
      }
#pragma unroll
      for (int n = 0; n < OWN; ++n) {
        if (STEPS % SHARE && at.share * OWN + n >= STEPS) break;
        u32 b[some][4];
#pragma unroll
        for (int k = 0; k < some; ++k)
          if (near)
            load_turned_tiles(b[k], rows[k] + n * 32);
          else
            load_piece(b[k], (const char*)(block.values + (i64)slots[k] * DIM) + column + n * 32);
#pragma unroll
        for (int k = 0; k < some; ++k) {
          u32 a[4];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            a[c] = at.token[c % 2] == begin + k ? p[c] : 0;
            // Whatever lies there must not meet the zeros.
            b[k][c] = there[k] ? b[k][c] : 0;
          }
          multiply(o[n][0], a, b[k][0], b[k][1]);
          multiply(o[n][1], a, b[k][2], b[k][3]);
        }
      }
    }
  }

  // Four tiles of which a lane's row is not in shared memory yet.
  __device__ void load_piece(u32 (&b)[4], const char* from) const {
    uint4* piece = block.shared.reused.of.pieces[threadIdx.x / 32] + at.lane;
    __syncwarp();
    *piece = __ldcg((const uint4*)from);
    __syncwarp();
    load_turned_tiles(b, shared_address(piece));
  }
};
