struct Rotary {
  const float* cos_of;  // [last + 1, pairs]
  const float* sin_of;
  const int* axes;       // [pairs]
  const int* positions;  // [3, length]
  float* cos;            // [slots, pairs] of one row
  float* sin;
  int pairs;
  int last;
  int length;
  int delta;
};

extern "C" __global__ void fill_rotary(Rotary rotary) {
  int slot = blockIdx.x;
  for (int pair = threadIdx.x; pair < rotary.pairs; pair += blockDim.x) {
    int position = slot + rotary.delta;
    if (slot < rotary.length)
      position = rotary.positions[(long long)rotary.axes[pair] * rotary.length + slot];
    position = position < 0 ? 0 : position > rotary.last ? rotary.last : position;
    long long from = (long long)position * rotary.pairs + pair;
    long long to = (long long)slot * rotary.pairs + pair;
    rotary.cos[to] = rotary.cos_of[from];
    rotary.sin[to] = rotary.sin_of[from];
  }
}
