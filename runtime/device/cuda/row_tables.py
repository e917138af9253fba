import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.arrangement import RowMove
from runtime.device.cuda.memory import CudaMemory
from runtime.device.cuda.programs import KernelLibrary
from runtime.device.cuda.row_moves import Moves, RowsArguments, prepare_moves, queue_moves
from runtime.device.cuda.upload import UploadRing
from runtime.request import RowRequest
from runtime.tensors.tensor import Tensor

_THREADS = 256
_PIECE = 1 << 14


class RowTables:
    """What the sampler knows of every token, per row: counts and bias.

    Bytes of device memory: 8 for each row and token, rounded up to 16 a row and table.
    """

    def __init__(
        self,
        library: KernelLibrary,
        memory: CudaMemory,
        ring: UploadRing,
        rows: int,
        vocab_size: int,
    ) -> None:
        self._library, self._ring, self._vocab_size = library, ring, vocab_size
        # Rows are moved in units of four words.
        self.pitch = -(-vocab_size // 4) * 4
        self.history = memory.zeros("token counts", (rows, self.pitch), np.dtype(np.uint32))
        self.bias = memory.zeros("logit bias", (rows, self.pitch), np.dtype(np.float32))
        self._ids = memory.zeros("sampler ids", (_PIECE,), np.dtype(np.int32))
        self._values = memory.zeros("sampler values", (_PIECE,), np.dtype(np.float32))
        self._table = memory.zeros("sampler tables", (2,), np.dtype(np.uint64))
        addresses = [self.history.address, self.bias.address]
        ring.upload(self._table.address, np.array(addresses, np.uint64))
        self._prepare()

    def count(self, row: int, request: RowRequest) -> None:
        """Take a row's history: prompt and generated tokens."""
        self._zero(self.history, row)
        self._count.arguments[0].value = self._row(self.history, row)
        for first in range(0, len(request.token_ids), _PIECE):
            ids = np.array(request.token_ids[first : first + _PIECE], np.int64)
            # An id that no int32 holds is outside of the vocabulary as well.
            known = np.where((ids >= 0) & (ids < self._vocab_size), ids, -1).astype(np.int32)
            self._ring.upload(self._ids.address, known)
            self._count.arguments[2].value = ids.size
            self._count.arguments[3].value = max(0, request.prompt_length - first)
            self._count.launch(-(-ids.size // _THREADS))

    def set_bias(self, row: int, ids: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        """Take a row's logit bias; its ids were checked against the vocabulary."""
        self._zero(self.bias, row)
        self._bias.arguments[0].value = self._row(self.bias, row)
        for first in range(0, ids.size, _PIECE):
            part = slice(first, first + _PIECE)
            self._ring.upload(self._ids.address, ids[part])
            self._ring.upload(self._values.address, values[part])
            self._bias.arguments[3].value = ids[part].size
            self._bias.launch(-(-ids[part].size // _THREADS))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Rows (source, target) move in their order; no source is an earlier target."""
        rows = [RowMove(source, target, 1) for source, target in moves]
        queue_moves(self._move, self._wide, self._moves, rows, 2)

    def _prepare(self) -> None:
        self._moves = Moves()
        self._wide = RowsArguments(self._table.address, 1, 1, self.pitch // 4)
        self._move = prepare_moves(self._library, "uint4", self._wide, self._moves)
        ids, values = ctypes.c_uint64(self._ids.address), ctypes.c_uint64(self._values.address)
        number, size, prompt = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int32()
        vocab = ctypes.c_int32(self._vocab_size)
        self._count = self._library.prepare(
            "sampling/history",
            "count_tokens",
            (),
            _THREADS,
            (ctypes.c_uint64(), ids, number, prompt, vocab),
        )
        self._bias = self._library.prepare(
            "sampling/history", "set_bias", (), _THREADS, (ctypes.c_uint64(), ids, values, size)
        )

    def _zero(self, table: Tensor, row: int) -> None:
        size = table.shape[1] * table.dtype.itemsize
        self._library.stream.zero(self._row(table, row), size)

    def _row(self, table: Tensor, row: int) -> int:
        return table.address + row * table.shape[1] * table.dtype.itemsize
