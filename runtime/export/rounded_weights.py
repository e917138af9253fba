"""A checkpoint's numbers as an engine has them: rounded to its types, and widened again."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.config import LLMEngineRunnerConfig
from runtime.export.checkpoint import Checkpoint
from runtime.export.quantize import quantize_rows
from runtime.export.weights import TILE_BYTES, cast
from runtime.tensors.dtypes import numpy_dtype

Array = NDArray[np.float32]


class RoundedWeights:
    """Reads tensors of a checkpoint, of matrices some megabytes at a time.

    `read` hears of the bytes of each piece of a matrix, once it is used, in float32.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: LLMEngineRunnerConfig,
        read: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._checkpoint = checkpoint
        self._quantization = config.weight_quantization
        self._block_size = config.weight_block_size
        self._dtype = numpy_dtype(config.dtype)
        self._read = read

    def vector(self, name: str) -> Array:
        """A vector, as norms and biases are."""
        return self._rounded(self._checkpoint.vector(name), name)

    def embed(self, name: str, token_ids: Sequence[int]) -> Array:
        """Rows of an embedding table [tokens, H]."""
        rows = [self._checkpoint.matrix(name, slice(i, i + 1), slice(None)) for i in token_ids]
        return self._rounded(np.concatenate(rows), name)

    def project(self, x: Array, name: str) -> Array:
        """The product of x [tokens, in] and a projection's matrix [out, in]: [tokens, out]."""
        rows, columns = self._checkpoint.rows_of(name), x.shape[1]
        product = np.empty((len(x), rows), np.float32)
        height = max(1, TILE_BYTES // (columns * 4))
        for start in range(0, rows, height):
            part = slice(start, min(start + height, rows))
            weights = self._projection(self._checkpoint.matrix(name, part, slice(None)), name)
            product[:, part] = (weights @ x.T).T
            self._read(weights.nbytes)
        return product

    def _projection(self, matrix: NDArray[np.generic], name: str) -> Array:
        """Some rows of a projection."""
        if self._quantization == "none":
            return self._rounded(matrix, name)
        wide = cast(matrix, np.dtype(np.float32), name)
        integers, scales = quantize_rows(wide.T, self._quantization, self._block_size)
        blocks = integers.reshape(-1, self._block_size, len(wide))
        weights = blocks * self._rounded(scales, name)[:, None, :]
        rows: Array = weights.reshape(integers.shape).T
        return rows

    def _rounded(self, array: NDArray[np.generic], name: str) -> Array:
        rounded: Array = cast(array, self._dtype, name).astype(np.float32, copy=False)
        return rounded
