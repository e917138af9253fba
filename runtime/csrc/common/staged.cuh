// Elements as the stages of wgmma.cu have them, [blocks of 64 inputs][tokens][64], so that one
// copy brings those of a tile. In half a block the 32-bit words i of its four pieces of sixteen
// bytes lie side by side, in the order of the pieces, and those of token t at place chunk ^ t % 8.

// Place of the 32-bit word with inputs 2 i and 2 i + 1 of a token.
__device__ __forceinline__ long long staged_word(int token, int tokens, int i) {
  int chunk = i / 16 % 2 * 4 + i % 4;
  return ((long long)(i / 32) * tokens + token) * 32 + (chunk ^ token % 8) * 4 + i / 4 % 4;
}
