"""A checkpoint's numbers as an engine has them: rounded to its types, and widened again."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runtime.config import LLMEngineRunnerConfig
from runtime.export.checkpoint import Checkpoint
from runtime.export.quantize import quantize_rows
from runtime.export.weights import TILE_BYTES, cast
from runtime.tensors.dtypes import numpy_dtype
from runtime.vision_config import VisionConfig

Array = NDArray[np.float32]
_WIDE = np.dtype(np.float32)


class RoundedWeights:
    """Reads tensors of a checkpoint, of matrices some megabytes at a time.

    `read` hears of the bytes of each piece of a matrix, once it is used, in float32.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: LLMEngineRunnerConfig | VisionConfig,
        read: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._checkpoint = checkpoint
        self._quantization = config.weight_quantization
        self._block_size = config.weight_block_size
        self._dtype = numpy_dtype(config.dtype)
        self._overflows = config.device == "cuda"
        self._read = read

    def vector(self, name: str) -> Array:
        """A vector, as norms and biases are."""
        return self._rounded(self._checkpoint.vector(name), name)

    def embed(self, name: str, token_ids: ArrayLike) -> Array:
        """Rows of an embedding table: [..., H]."""
        ids = np.asarray(token_ids)
        rows = [self._checkpoint.matrix(name, slice(i, i + 1), slice(None)) for i in ids.flat]
        return self._rounded(np.concatenate(rows), name).reshape(*ids.shape, -1)

    def table(self, name: str) -> Array:
        """A whole matrix, as that of learned positions is."""
        return self._rounded(self._checkpoint.matrix(name, slice(None), slice(None)), name)

    def project(self, x: Array, name: str) -> Array:
        """The product of x [..., in] and a projection's matrix [out, in]: [..., out]."""
        rows, columns = self._checkpoint.shape(name)[0], x.shape[-1]
        inputs = x.reshape(-1, columns)
        product = np.empty((len(inputs), rows), np.float32)
        height = max(1, TILE_BYTES // (columns * 4))
        for start in range(0, rows, height):
            part = slice(start, min(start + height, rows))
            weights = self._projection(self._checkpoint.matrix(name, part, slice(None)), name)
            product[:, part] = (weights @ inputs.T).T
            self._read(weights.nbytes)
        return product.reshape(*x.shape[:-1], rows)

    def rounded_inputs(self, x: Array) -> Array:
        """What a product makes of x [..., in]: with quantised weights 8 bits a block (on CPUs)."""
        if self._quantization == "none":
            rounded = x.astype(self._dtype).astype(np.float32)
            # A CPU keeps float32 from one operator to the next.
            return rounded if self._overflows else np.where(np.isfinite(rounded), rounded, x)
        return _quantized(x.reshape(-1, x.shape[-1]), "int8", self._block_size).reshape(x.shape)

    def _projection(self, matrix: NDArray[np.generic], name: str) -> Array:
        """Some rows of a projection."""
        if self._quantization == "none":
            return self._rounded(matrix, name)
        wide = cast(matrix, _WIDE, name)
        return _quantized(wide, self._quantization, self._block_size, self._dtype)

    def _rounded(self, array: NDArray[np.generic], name: str) -> Array:
        rounded: Array = cast(array, self._dtype, name).astype(np.float32, copy=False)
        return rounded


def _quantized(rows: Array, bits: str, block_size: int, scales_in: np.dtype[Any] = _WIDE) -> Array:
    """Rows [n, in] of integers with a scale for each block, widened again."""
    integers, scales = quantize_rows(rows.T, bits, block_size)
    scales = cast(scales, scales_in, "scale").astype(np.float32, copy=False)
    blocks = integers.reshape(-1, block_size, len(rows)) * scales[:, None, :]
    widened: Array = blocks.reshape(integers.shape).T
    return widened
