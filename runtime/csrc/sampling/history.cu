// Record of the sampler of each token of a row: SEEN in the prompt or generated, and how often
// it was generated. rows.cuh reads these tables.

#define SEEN 0x80000000u

// Ids outside the vocabulary have no logit and are not counted.
extern "C" __global__ void count_tokens(unsigned* history, const int* ids, int n, int prompt,
                                        int vocab) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n || ids[i] < 0 || ids[i] >= vocab) return;
  atomicOr(history + ids[i], SEEN);
  if (i >= prompt) atomicAdd(history + ids[i], 1u);
}

extern "C" __global__ void set_bias(float* bias, const int* ids, const float* values, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) bias[ids[i]] = values[i];
}
