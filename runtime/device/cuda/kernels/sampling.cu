#include "ranks.cuh"
#include "sampling_rows.cuh"
#include "sampling_draw.cuh"
// ---- the highest score of every row, over several blocks a row ----

extern "C" __global__ void __launch_bounds__(256) find_best(Batch batch) {
  int r = blockIdx.y;
  Row row = batch.rows[r];
  const float* logits = batch.logits + (long long)r * batch.vocab;
  Scan scan = scan_row(batch, row, r, logits, blockIdx.x * blockDim.x + threadIdx.x,
                       gridDim.x * blockDim.x);
  Best found = join<8>(scan);
  if (threadIdx.x == 0 && combine(batch.partial + r, &found)) finish_row(batch, row, r, found);
}

// ---- one block a row: the draw, log probabilities ----

extern "C" __global__ void __launch_bounds__(THREADS) pick_rows(Batch batch) {
  __shared__ Shared shared;
  int r = blockIdx.x + batch.waiting;
  Row row = batch.rows[r];
  if (batch.state[r].failed || (row.temperature == 0 && row.logprobs < 0)) return;
  Spot spot = {r, batch.logits + (long long)r * batch.vocab, (u64)batch.start[r],
               batch.results + r};
  int token = batch.next_tokens[r];
  if (row.temperature > 0) {
    token = draw(batch, row, spot, batch.state[r].highest, shared);
    if (threadIdx.x == 0) {
      accept(batch, row, r, token);
      batch.results[r].token = token;
    }
  }
  if (row.logprobs >= 0) report(batch, row, spot, batch.state[r].raw_highest, token, shared);
}

// ---- evictions ----

// The newest tokens of `count` rows that stay; rows only move down, the first goes first.
extern "C" __global__ void move_tokens(int* tokens, Kept kept) {
  for (int i = 0; i < kept.count; ++i) tokens[i] = tokens[kept.source[i]];
}
