import ctypes
from collections.abc import Sequence

import numpy as np

from runtime.device.cuda.element_types import index_type
from runtime.device.cuda.launch import KernelLibrary, addresses, integers
from runtime.device.cuda.memory import CudaMemory
from runtime.device.cuda.row_settings import (
    BIAS,
    HISTORY,
    ROW,
    SettingsRow,
    needs_row_kernel,
    row_biases,
    row_settings,
)
from runtime.device.cuda.row_tables import RowTables
from runtime.device.cuda.sample_ring import CudaPendingSamples, SampleRing
from runtime.device.cuda.upload import UploadRing
from runtime.device.cuda.walks import PARTIAL, CudaPendingPaths, TreeWalks, empty_partial
from runtime.device.device import MOST_GPU_ROWS, SamplerBuffers
from runtime.errors import HearthError
from runtime.request import RowRequest, check_options

_SCAN_THREADS, _PICK_THREADS = 256, 1024
# A block of the scan reads this many logits at least; more blocks than that serve no purpose.
_SCAN_LOGITS, _SCAN_BLOCKS = 2048, 64
_STATE_BYTES = 16


class BatchArguments(ctypes.Structure):
    """`Batch` of kernels/sampling_rows.cuh."""

    _fields_ = (
        *addresses("logits start next_tokens rows history bias partial state results"),
        *integers("vocab pitch waiting"),
    )


class KeptRows(ctypes.Structure):
    """`Kept` of kernels/sampling_rows.cuh: the rows that an eviction leaves."""

    _fields_ = (("count", ctypes.c_int32), ("source", ctypes.c_int32 * MOST_GPU_ROWS))


class CudaBatchSampler:
    """Picks tokens on the device: one launch for greedy rows, a second where a row draws.

    Walks through trees are one launch or two. Nothing here waits for the device; results are read
    by `CudaPendingSamples` and `CudaPendingPaths`.
    """

    def __init__(
        self, library: KernelLibrary, memory: CudaMemory, ring: UploadRing, buffers: SamplerBuffers
    ) -> None:
        self._capacity = buffers.lengths.shape[0]
        self._vocab_size = buffers.logits.shape[-1]
        if self._capacity > MOST_GPU_ROWS:
            raise HearthError("internal", f"the sampler serves at most {MOST_GPU_ROWS} rows")
        self._stream = library.stream
        self._ring = ring
        self._tables = RowTables(library, memory, ring, self._capacity, self._vocab_size)
        self._slots = SampleRing(library.context, memory, self._capacity)
        self._device_rows = memory.zeros("sampling settings", (self._capacity,), ROW)
        self._rows: list[SettingsRow] = []
        self._wanted: list[int] = []
        self._logprobs: dict[int, int] = {}
        self._draws = self._adjusts = False
        wanted = -(-self._vocab_size // _SCAN_LOGITS)
        self._blocks = min(_SCAN_BLOCKS, wanted)
        self._prepare(library, memory, buffers)

    def begin(self, rows: Sequence[RowRequest]) -> None:
        """Take settings and histories; raises `invalid_value` naming the setting."""
        if len(rows) > self._capacity:
            raise HearthError("internal", f"{len(rows)} rows exceed {self._capacity}")
        for request in rows:
            check_options(request.options, self._vocab_size)
        settings = [row_settings(request.options, self._vocab_size) for request in rows]
        for row, request in enumerate(rows):
            if settings[row][-1] & HISTORY:
                self._tables.count(row, request)
            if settings[row][-1] & BIAS:
                self._tables.set_bias(row, *row_biases(request.options))
        self._take(settings)

    def sample(self, rows: int, waiting: int = 0) -> CudaPendingSamples:
        """Queue the picks of rows `waiting` to `rows`; the rows before are only checked."""
        if not 0 <= waiting <= rows <= len(self._rows):
            raise HearthError("internal", f"cannot sample {rows} rows, {waiting} waiting")
        slot = self._slots.take()
        batch = self._batch
        batch.results = slot.address
        batch.waiting = waiting
        if rows:
            self._scan.launch(self._blocks, rows)
        if self._draws and rows > waiting:
            self._pick.launch(rows - waiting)
        return CudaPendingSamples(slot, self._stream, rows, waiting, self._logprobs)

    def verify(self, rows: int, width: int) -> CudaPendingPaths:
        """Queue the walks of the first rows' trees; raises `internal` where there are none."""
        if self._walks is None or not 0 <= rows <= len(self._rows):
            raise HearthError("internal", f"cannot verify the trees of {rows} rows")
        return self._walks.launch(
            width, self._wanted[:rows], self._blocks, greedy=not (self._draws or self._adjusts)
        )

    def compact(self, mapping: Sequence[int]) -> None:
        """Keep the rows that stay, with histories, settings and newest tokens."""
        kept = [row for row, target in enumerate(mapping) if target >= 0]
        if [mapping[row] for row in kept] != list(range(len(kept))):
            raise HearthError("internal", f"an eviction cannot map rows to {list(mapping)}")
        moves = [(row, target) for target, row in enumerate(kept) if self._rows[row][-1]]
        self._tables.move(moves)
        self._kept.count = len(kept)
        for target, row in enumerate(kept):
            self._kept.source[target] = row
        if kept and kept[-1] != len(kept) - 1:
            self._move_tokens.launch(1)
        self._take([self._rows[row] for row in kept])

    def _prepare(self, library: KernelLibrary, memory: CudaMemory, buffers: SamplerBuffers) -> None:
        tables = self._tables
        partial = memory.zeros("sampling partial results", (self._capacity,), PARTIAL)
        state = memory.zeros("sampling state", (self._capacity, _STATE_BYTES), np.dtype(np.uint8))
        self._ring.upload(partial.address, empty_partial(self._capacity))
        self._batch = BatchArguments(
            buffers.logits.address,
            buffers.lengths.address,
            buffers.next_tokens.address,
            self._device_rows.address,
            tables.history.address,
            tables.bias.address,
            partial.address,
            state.address,
            0,
            self._vocab_size,
            tables.pitch,
        )
        # Without fused multiply-add every score rounds as in NumPy.
        options = (f"-DINDEX={index_type(buffers.lengths.dtype, 'start')}", "--fmad=false")
        arguments = (self._batch,)
        self._scan = library.prepare("sampling", "find_best", options, _SCAN_THREADS, arguments)
        self._pick = library.prepare("sampling", "pick_rows", options, _PICK_THREADS, arguments)
        self._kept = KeptRows()
        tokens = ctypes.c_uint64(buffers.next_tokens.address)
        self._move_tokens = library.prepare(
            "sampling", "move_tokens", options, 1, (tokens, self._kept)
        )
        self._walks: TreeWalks | None = None
        if buffers.trees is not None:
            self._walks = TreeWalks(
                library, memory, self._ring, buffers.trees, batch=self._batch, options=options
            )

    def _take(self, settings: list[SettingsRow]) -> None:
        self._rows = settings
        self._draws = any(needs_row_kernel(row) for row in settings)
        self._adjusts = any(row[-1] for row in settings)
        self._wanted = [row[8] for row in settings]
        self._logprobs = {row: count for row, count in enumerate(self._wanted) if count >= 0}
        if settings:
            self._ring.upload(self._device_rows.address, np.array(settings, ROW))
