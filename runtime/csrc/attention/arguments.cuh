// Arguments of the kernels of attention. Include behind numbers.cuh and rotate.cuh, and where
// QUERY_HEADS and KV_HEADS are known.

constexpr int GROUP = QUERY_HEADS / KV_HEADS;
constexpr int HEADS = QUERY_HEADS + 2 * KV_HEADS;

typedef long long i64;

struct Arguments {
  const float* qkv;      // [T, HEADS, DIM]: FUSED, and for `rotate`
  u16* queries;      // [T, QUERY_HEADS, DIM], rotated: not FUSED
  u16* keys;         // [batch, KV_HEADS, kv_len, DIM]
  u16* values;
  const i64* start;      // [batch]
  const i64* positions;  // [batch, seq_len]
  const float* cos;      // [rows of a table, ROTARY / 2], or such for each row
  const float* sin;
  const u16* q_gain;  // [DIM], or null
  const u16* k_gain;
  const u32* mask;  // [batch, seq_len, words]
  u16* out;     // [T, QUERY_HEADS, DIM]
  float* partial;   // [tiles * batch, KV_HEADS, units, rows of a block, DIM]
  float2* sums;     // the same without DIM: maximum and sum
  u32* tickets;     // [tiles * batch, KV_HEADS, TOKENS], 0 before and after
  float eps;
  float scale;
  int batch;
  int seq_len;
  int kv_len;
  int table_rows;  // of each row's own tables, 0 where all share one
  int units;       // most units of a tile
  int fine;        // most splits of which each is a unit
};

__device__ int first_slot(const Arguments& a, int row) {
  i64 start = a.start[row];
  return start < 0 ? 0 : start > a.kv_len ? a.kv_len : (int)start;
}

__device__ const float* cosines(const Arguments& a, int row, int token) {
  return angles_of(a.cos, a.positions[token], a.table_rows ? row : 0, a.table_rows);
}
__device__ const float* sines(const Arguments& a, int row, int token) {
  return angles_of(a.sin, a.positions[token], a.table_rows ? row : 0, a.table_rows);
}
