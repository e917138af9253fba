"""Types and sizes of what the benches of GPU ops move: those of Qwen3-0.6B."""

import numpy as np

from bench.random_model import SHAPE_06B

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
LAYERS, HEADS, HEAD_DIM = SHAPE_06B.layers, SHAPE_06B.kv_heads, SHAPE_06B.head_dim
VOCAB, HIDDEN = SHAPE_06B.vocabulary, SHAPE_06B.hidden
SLOTS = 1024
