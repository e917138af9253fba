// Fill of the stages of a narrow product with quantised weights by a warp: all rows of a group at
// once, sixteen bytes a lane, from places that are looked up once a group. Include behind
// outputs.cuh.

constexpr int CHUNKS = STAGE_ROW / 16;
constexpr int ROWS_AT_ONCE = 32 / CHUNKS;
constexpr int COPIES = (Config::EIGHTS * 8 + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
constexpr int WORD_COPIES = (Config::EIGHTS * 8 + 31) / 32;

struct Feed {
  const char* integers[COPIES];
  const char* scales[WORD_COPIES];
  const char* zeros[WORD_COPIES];
  bool there[COPIES], words_there[WORD_COPIES];

  __device__ __forceinline__ void look_up(const Arguments& a, int group, int lane) {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      int at = i * ROWS_AT_ONCE + lane / CHUNKS, row = at % 8;
      Rows rows = eight_of(a, group * Config::EIGHTS + at / 8);
      there[i] = at < Config::EIGHTS * 8 && row < rows.rows;
      integers[i] = rows.first + row * (int)ROW_BYTES + lane % CHUNKS * 16;
    }
#pragma unroll
    for (int i = 0; i < WORD_COPIES; ++i) {
      int at = i * 32 + lane, row = at % 8;
      Rows rows = eight_of(a, group * Config::EIGHTS + at / 8);
      words_there[i] = at < Config::EIGHTS * 8 && row < rows.rows;
      scales[i] = rows.scale + row * SCALES_OF_ROW * 2;
      if (Config::ZEROS) zeros[i] = rows.zero + row * SCALES_OF_ROW;
    }
  }

  __device__ __forceinline__ void copy(u32 stage, int block, int lane) const {
    int chunk_row = lane / CHUNKS, word_row = lane;
    u32 to = stage + chunk_row / 8 * WEIGHT_BYTES + place_of_chunk(chunk_row % 8, lane % CHUNKS);
#pragma unroll
    for (int i = 0; i < COPIES; ++i)
      if (i * ROWS_AT_ONCE + chunk_row < Config::EIGHTS * 8)
        copy_once(to + i * (ROWS_AT_ONCE / 8) * WEIGHT_BYTES, integers[i] + block * STAGE_ROW,
                   there[i]);
    to = stage + word_row / 8 * WEIGHT_BYTES + STAGE_ROW * 8 + word_row % 8 * 4;
    int index = first_scale(block);
#pragma unroll
    for (int i = 0; i < WORD_COPIES; ++i) {
      if (i * 32 + word_row >= Config::EIGHTS * 8) continue;
      copy_word(to + i * 4 * WEIGHT_BYTES, scales[i] + index * 2, words_there[i]);
      if (Config::ZEROS)
        copy_word(to + i * 4 * WEIGHT_BYTES + 32, zeros[i] + index, words_there[i]);
    }
  }
};
