"""A checkpoint's numbers as an engine has them: rounded to its types, and widened again."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hearth.runtime.config import LLMEngineRunnerConfig, Quantization
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.layout import EMBEDDING, HEAD
from hearth.runtime.export.weights import TILE_BYTES, cast, in_threads, quantised, reads_as_stored
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.vision_config import VisionConfig
from hearth.runtime.weights.quantised import round_weights, widen

Array = NDArray[np.float32]
_WIDE = np.dtype(np.float32)


class RoundedWeights:
    """Reads tensors of a checkpoint, of matrices some megabytes at a time.

    `read` gets the bytes of each piece of a matrix, once it is used, in float32.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: LLMEngineRunnerConfig | VisionConfig,
        read: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._checkpoint = checkpoint
        self._body, self._head = config.weight_quantization, config.head_weights
        self._signed = reads_as_stored(config)
        self._block_size = config.weight_block_size
        self._dtype = self._table = numpy_dtype(config.dtype)
        if isinstance(config, LLMEngineRunnerConfig) and config.embedding_dtype is not None:
            self._table = numpy_dtype(config.embedding_dtype)
        self._cuda = config.device == "cuda"
        self._read = read

    def vector(self, name: str) -> Array:
        """A vector, as norms and biases are."""
        return self._rounded(self._checkpoint.vector(name), name)

    def embed(self, name: str, token_ids: ArrayLike) -> Array:
        """Rows of an embedding table: [..., H]."""
        ids = np.asarray(token_ids)
        rows = [self._checkpoint.matrix(name, slice(i, i + 1), slice(None)) for i in ids.flat]
        stored = cast(np.concatenate(rows), self._table, name)
        return self._rounded(stored, name).reshape(*ids.shape, -1)

    def table(self, name: str) -> Array:
        """A whole matrix, as that of learned positions is."""
        return self._rounded(self._checkpoint.matrix(name, slice(None), slice(None)), name)

    def project(self, x: Array, name: str) -> Array:
        """The product of x [..., in] and a projection's matrix [out, in]: [..., out]."""
        rows, columns = self._checkpoint.shape(name)[0], x.shape[-1]
        inputs = x.reshape(-1, columns)
        product = np.empty((len(inputs), rows), np.float32)
        height = max(1, TILE_BYTES // (columns * 4))
        parts = [slice(start, min(start + height, rows)) for start in range(0, rows, height)]

        def tile(part: slice) -> Array:
            return self._projection(self._checkpoint.matrix(name, part, slice(None)), name)

        tiles = in_threads(tile, parts) if len(parts) > 1 else map(tile, parts)
        for part, weights in zip(parts, tiles, strict=True):
            product[:, part] = (weights @ inputs.T).T
            self._read(weights.nbytes)
        return product.reshape(*x.shape[:-1], rows)

    def rounded_inputs(self, x: Array) -> Array:
        """Round x [..., in] as a product does: of quantised weights on a CPU to 8 bits a block."""
        if self._body == "none" or self._cuda:
            rounded = x.astype(self._dtype).astype(np.float32)
            # A CPU keeps float32 from one operator to the next.
            return rounded if self._cuda else np.where(np.isfinite(rounded), rounded, x)
        rows = x.reshape(-1, x.shape[-1])
        blocks = round_weights(rows, "int8", self._block_size, _WIDE)
        return widen(blocks, _WIDE).reshape(x.shape)

    def _projection(self, matrix: NDArray[np.generic], name: str) -> Array:
        """Some rows of a projection; a CPU keeps the dequantised weights in float32."""
        kind: Quantization = self._head if name in (HEAD, EMBEDDING) else self._body
        if kind == "none":
            return self._rounded(matrix, name)
        made = quantised(matrix, kind, self._block_size, self._dtype, name, signed=self._signed)
        wide = widen(made, self._dtype if self._cuda else _WIDE)
        return wide.astype(np.float32, copy=False)

    def _rounded(self, array: NDArray[np.generic], name: str) -> Array:
        rounded: Array = cast(array, self._dtype, name).astype(np.float32, copy=False)
        return rounded
