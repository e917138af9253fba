#include "common/ranks.cuh"
#include "sampling/rows.cuh"
#include "sampling/draw.cuh"
#include "common/last_block.cuh"
#include "sampling/wide.cuh"
// ---- the highest score of every row, over several blocks a row ----

// All rows that are live in a turn: the last one ends it.
__device__ void end_turn(Turn* turn, int live) {
  __threadfence();
  if (atomicAdd(&turn->done, 1u) != live - 1) return;
  turn->done = 0;
  turn->number += 1;
}

extern "C" __global__ void __launch_bounds__(256) find_best(Batch batch) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  Turn* turn = batch.turn;
  int live = turn ? turn->live : gridDim.y;
  u32 slot = turn ? turn->number % SLOTS : 0;
  Spot spot = spot_of(batch, blockIdx.y);
  spot.result += (long long)slot * batch.capacity;
  Row row = batch.rows[spot.r];
  Scan scan = scan_row(batch, row, spot, blockIdx.x * blockDim.x + threadIdx.x,
                       gridDim.x * blockDim.x);
  Best found = join<8>(scan);
  if (threadIdx.x || (int)blockIdx.y >= live) return;
  if (!combine(batch.partial + blockIdx.y, &found)) return;
  finish_row(batch, row, spot, found);
  if (!turn) return;
  ((INDEX*)batch.start)[spot.r] += 1;
  end_turn(turn, live);
}

// ---- draws (z 0) and log probabilities (z 1): x has the blocks of one, y the rows ----

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) weigh_rows(Batch batch, Wide wide) {
  __shared__ Shared shared;
  Spot spot = spot_of(batch, wide.first + blockIdx.y);
  Row row = batch.rows[spot.r];
  State state = batch.state[spot.r];
  if (state.failed) return;
  if (blockIdx.z) {
    if (row.logprobs >= 0) weigh_raw(batch, row, {spot, state.raw_highest}, wide, shared);
  } else if (row.temperature > 0) {
    int token = weigh({batch, row, spot, state.highest}, wide, shared);
    if (token >= 0 && threadIdx.x == 0) accept(batch, row, spot, token);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) pick_rows(Batch batch, Wide wide) {
  __shared__ Shared shared;
  Spot spot = spot_of(batch, wide.first + blockIdx.y);
  Row row = batch.rows[spot.r];
  State state = batch.state[spot.r];
  if (state.failed) return;
  if (blockIdx.z) {
    if (row.logprobs > 0) pick_raw(batch, row, {spot, state.raw_highest}, wide, shared);
  } else if (row.temperature > 0) {
    int token = pick({batch, row, spot, state.highest}, wide, shared);
    if (token >= 0 && threadIdx.x == 0) accept(batch, row, spot, token);
  }
}

// ---- rows that move ----

// The newest tokens of rows, in the order of the moves; one thread.
extern "C" __global__ void move_tokens(int* tokens, Moves moves) {
  for (int i = 0; i < moves.count; ++i) tokens[moves.target[i]] = tokens[moves.source[i]];
}
