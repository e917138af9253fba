// Rows of hidden states, copied as UNIT.

typedef UNIT unit;

// One block for each of the rows of `out` [rows, n, width]; `source` is [rows, pitch, width].
extern "C" __global__ void gather_rows(const unit* source, unit* out, const int* index, int n,
                                       int pitch, int width) {
  long long place = blockIdx.x, row = place / n;
  int from = index[place];
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    out[place * width + i] = from < 0 ? unit() : source[(row * pitch + from) * width + i];
}
