#include "step/steps.cuh"
#define LENGTHS 256

__device__ void enter(const Feed& feed) {
  let_next_begin();
  int place = blockIdx.x;
  int row = place / feed.steps;
  int step = place - row * feed.steps;
  if (threadIdx.x == 0) {
    const long long* lengths = feed.token_ids + (long long)feed.rows * feed.steps;
    long long length = lengths[row], first = lengths[feed.rows + row];
    if (first < 0) first = feed.start[row];
    feed.positions[place] = step < length ? (INDEX)(first + step) : 0;
    if (step == 0) feed.select[row] = length > 0 ? (INDEX)(length - 1) : 0;
  }
  if (feed.mask)
    for (int i = threadIdx.x; i < feed.steps; i += blockDim.x)
      feed.mask[(long long)place * feed.steps + i] = i <= step;
  int words = (feed.steps + 31) / 32;
  if (feed.packed)
    for (int i = threadIdx.x; i < words; i += blockDim.x)
      feed.packed[(long long)place * words + i] =
          i < step / 32 ? ~0u : i == step / 32 ? (2u << step % 32) - 1 : 0;
  embed(feed, feed.token_ids[place], place);
}

extern "C" __global__ void feed_prefill(Feed feed) { enter(feed); }

// Paths of a walk in `live` of `rows` rows, as the entries that `feed_entries` brings along: in
// [rows, steps], behind those that are there. `paths` [rows, 1 + levels] has the number of nodes and
// these, `tokens` the sample behind each, `pitch` bytes apart. `lengths` counts them already; the
// trees have `width` nodes.
struct Found {
  long long* entries;
  const int* paths;
  const char* tokens;
  const INDEX* lengths;
  int pitch;
  int levels;
  int width;
  int live;
  int rows;
  int steps;
};

extern "C" __global__ void enter_paths(Found found) {
  int rows = found.rows, places = rows * found.steps;
  long long* lengths = found.entries + places;
  for (int row = threadIdx.x; row < rows; row += blockDim.x) {
    bool live = row < found.live;
    int count = live ? max(0, found.paths[row * (1 + found.levels)]) : 1;
    long long filled = live ? lengths[3 * rows + row] : 0;
    lengths[row] = max(1, count);
    lengths[rows + row] = live ? (long long)found.lengths[row] - count : 0;
    lengths[2 * rows + row] = filled;
    lengths[3 * rows + row] = filled + count;
  }
  for (int place = threadIdx.x; place < places; place += blockDim.x) {
    int row = place / found.steps, step = place % found.steps;
    const int* path = found.paths + row * (1 + found.levels);
    bool entered = row < found.live && step < path[0];
    int token = 0;
    if (entered) token = *(const int*)(found.tokens + (row * found.levels + step) * (long long)found.pitch);
    found.entries[place] = token;
    lengths[4 * rows + place] = entered ? row * found.width + path[1 + step] : -1;
  }
}

#ifdef HIDDEN
typedef HIDDEN hidden;

// The same of entries of a draft's cache. Behind all else they bring along how many slots are filled
// before and after them, [rows] each, and where their hidden states lie: [rows, steps], -1 for zeros.
// `source` and `out` have rows of `width` HIDDEN; `grown` is the start of the steps behind this one.
extern "C" __global__ void feed_entries(Feed feed, const hidden* source, hidden* out, INDEX* start,
                                        INDEX* grown, int width) {
  enter(feed);
  long long place = blockIdx.x, row = place / feed.steps;
  const long long* filled = feed.token_ids + (long long)feed.rows * (feed.steps + 2);
  if (place % feed.steps == 0 && threadIdx.x == 0) {
    start[row] = (INDEX)filled[row];
    grown[row] = (INDEX)filled[feed.rows + row];
  }
  long long from = filled[2LL * feed.rows + place];
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    out[place * width + i] = from < 0 ? hidden() : source[from * width + i];
}
#endif

extern "C" __global__ void feed_decode(Feed feed) {
  let_next_begin();
  int row = blockIdx.x;
  if (threadIdx.x == 0) {
    feed.positions[row] = feed.start[row];
    feed.select[row] = 0;
    if (feed.mask) feed.mask[row] = 1;
    if (feed.packed) feed.packed[row] = 1;
  }
  embed(feed, feed.next_tokens[row], row);
}

extern "C" __global__ void advance(INDEX* start, int rows) {
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows) start[row] += 1;
}

struct Lengths {
  int first;
  int count;
  int values[LENGTHS];
};

extern "C" __global__ void set_lengths(INDEX* start, Lengths lengths) {
  for (int i = threadIdx.x; i < lengths.count; i += blockDim.x)
    start[lengths.first + i] = lengths.values[i];
}
