// Rows of K/V buffers, dense [rows, heads, slots, head_dim], all buffers in one launch through a
// table of their addresses. A slot has `width` units of UNIT, at most 16 bytes each.

#define MOVES 64
#define PAGES 64
// Moves of which a thread holds the data at the same time.
#define AHEAD 4

typedef UNIT unit;

struct Rows {
  const unsigned long long* buffers;
  int heads;
  int slots;
  int width;
};

__device__ unit* block_of(const Rows& rows, int row, int head) {
  unit* buffer = (unit*)rows.buffers[blockIdx.z];
  return buffer + ((long long)row * rows.heads + head) * rows.slots * rows.width;
}

// `fresh` has the addresses of new rows [rows, heads, steps, head_dim], the first of which is place
// `first`; grid x covers heads * steps * width, y the rows, z the buffers.
extern "C" __global__ void write_rows(Rows rows, const unsigned long long* fresh,
                                      const INDEX* start, int steps, int first) {
  int offset = blockIdx.x * blockDim.x + threadIdx.x;
  int row = blockIdx.y;
  if (offset >= rows.heads * steps * rows.width) return;
  int step = offset / rows.width % steps;
  int head = offset / rows.width / steps;
  long long slot = (long long)start[row] + step;
  // A slot outside the buffer would overwrite another row.
  if (slot < 0 || slot >= rows.slots) return;
  const unit* from = (const unit*)fresh[blockIdx.z];
  block_of(rows, first + row, head)[slot * rows.width + offset % rows.width] =
      from[(long long)row * rows.heads * steps * rows.width + offset];
}

struct Moves {
  int count;
  int source[MOVES];
  int target[MOVES];
  int used[MOVES];
};

// A thread owns one offset within a row and moves it from row to row. No source is an earlier
// target, so loading ahead is safe; a target may be an earlier source, which has been loaded by
// then, and no target is written twice.
extern "C" __global__ void move_rows(Rows rows, Moves moves) {
  int offset = blockIdx.x * blockDim.x + threadIdx.x;
  int head = blockIdx.y;
  int slot = offset / rows.width;
  if (slot >= rows.slots) return;
  unit* base = block_of(rows, 0, head) + offset;
  long long pitch = (long long)rows.heads * rows.slots * rows.width;
  unit held[AHEAD];
  for (int first = 0; first < moves.count; first += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      int m = first + i;
      if (m < moves.count && slot < moves.used[m]) held[i] = base[moves.source[m] * pitch];
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      int m = first + i;
      if (m < moves.count && slot < moves.used[m]) base[moves.target[m] * pitch] = held[i];
    }
  }
}

// Slots from `begin` to `end` of a row; grid y has the heads.
extern "C" __global__ void zero_slots(Rows rows, int row, int begin, int end) {
  long long size = (long long)(end - begin) * rows.width;
  long long stride = (long long)gridDim.x * blockDim.x;
  unit* base = block_of(rows, row, blockIdx.y) + (long long)begin * rows.width;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += stride)
    base[i] = unit();
}

// A pool of pages, dense [pages, buffers, heads, page_tokens, head_dim], and copies between it and
// rows: `count` slots of a row from `slot` on lie in a page from `offset` on.
struct Pages {
  unit* pool;
  int page_tokens;
  int save;
  int page[PAGES];
  int offset[PAGES];
  int row[PAGES];
  int slot[PAGES];
  int tokens[PAGES];
};

// Grid x covers heads * count * width of the largest copy, y the copies, z the buffers. The pool
// may lie in pinned memory.
extern "C" __global__ void copy_pages(Rows rows, Pages pages) {
  int copy = blockIdx.y;
  int unit_of_slot = (blockIdx.x * blockDim.x + threadIdx.x) % rows.width;
  int token = (blockIdx.x * blockDim.x + threadIdx.x) / rows.width;
  int count = pages.tokens[copy];
  if (token >= rows.heads * count) return;
  int head = token / count;
  token %= count;
  unit* own = block_of(rows, pages.row[copy], head) +
              (long long)(pages.slot[copy] + token) * rows.width + unit_of_slot;
  long long block = ((long long)pages.page[copy] * gridDim.z + blockIdx.z) * rows.heads + head;
  unit* stored = pages.pool +
                 (block * pages.page_tokens + pages.offset[copy] + token) * rows.width +
                 unit_of_slot;
  if (pages.save)
    *stored = *own;
  else
    *own = *stored;
}

struct Path {
  const int* nodes;  // [rows, count], then the starts [rows]
  int rows;
  int count;
};

// Slot start + nodes[i] becomes slot start + i; negative nodes end a row. A thread owns one unit
// of a slot and takes the slots in their order. Nodes ascend, so nodes[i] >= i: a slot that is
// written is never one that is still to be read, and loading ahead is safe.
extern "C" __global__ void commit_path(Rows rows, Path path) {
  int offset = blockIdx.x * blockDim.x + threadIdx.x;
  int row = blockIdx.y;
  if (offset >= rows.heads * rows.width) return;
  const int* nodes = path.nodes + row * path.count;
  long long start = path.nodes[path.rows * path.count + row];
  unit* base = block_of(rows, row, offset / rows.width) + start * rows.width + offset % rows.width;
  unit held[AHEAD];
  for (int first = 0; first < path.count && nodes[first] >= 0; first += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      int node = first + i < path.count ? nodes[first + i] : -1;
      if (node > first + i) held[i] = base[(long long)node * rows.width];
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      int node = first + i < path.count ? nodes[first + i] : -1;
      if (node > first + i) base[(long long)(first + i) * rows.width] = held[i];
    }
  }
}
