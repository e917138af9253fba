#include "ranks.cuh"
#include "sampling_rows.cuh"
#include "sampling_draw.cuh"
// ---- the highest score of every row, over several blocks a row ----

extern "C" __global__ void __launch_bounds__(256) find_best(Batch batch) {
  int i = blockIdx.y, r = batch.first + i;
  Row row = batch.rows[r];
  const float* logits = batch.logits + (long long)i * batch.vocab;
  Scan scan = scan_row(batch, row, r, logits, blockIdx.x * blockDim.x + threadIdx.x,
                       gridDim.x * blockDim.x);
  Best found = join<8>(scan);
  if (threadIdx.x == 0 && combine(batch.partial + i, &found)) finish_row(batch, row, r, found);
}

// ---- one block a row: the draw, log probabilities ----

extern "C" __global__ void __launch_bounds__(THREADS) pick_rows(Batch batch) {
  __shared__ Shared shared;
  int i = blockIdx.x, r = batch.first + i;
  Row row = batch.rows[r];
  if (batch.state[r].failed || (row.temperature == 0 && row.logprobs < 0)) return;
  Spot spot = {r, batch.logits + (long long)i * batch.vocab, (u64)batch.start[r],
               batch.results + i};
  int token = batch.next_tokens[r];
  if (row.temperature > 0) {
    token = draw(batch, row, spot, batch.state[r].highest, shared);
    if (threadIdx.x == 0) {
      accept(batch, row, r, token);
      spot.result->token = token;
    }
  }
  if (row.logprobs >= 0) report(batch, row, spot, batch.state[r].raw_highest, token, shared);
}

// ---- rows that move ----

// The newest tokens of rows, in the order of the moves; one thread.
extern "C" __global__ void move_tokens(int* tokens, Moves moves) {
  for (int i = 0; i < moves.count; ++i) tokens[moves.target[i]] = tokens[moves.source[i]];
}
