import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder, RowMove
from hearth.runtime.device.cuda.element_types import index_type
from hearth.runtime.device.cuda.launch import KernelLaunch, addresses, integers
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.programs import KernelLibrary
from hearth.runtime.device.cuda.sample_ring import CudaPendingSamples, SampleRing, SampleSlot
from hearth.runtime.device.cuda.storage import Moves, RowsArguments, prepare_moves, queue_moves
from hearth.runtime.device.cuda.stream import CudaStream
from hearth.runtime.device.cuda.upload import UploadRing
from hearth.runtime.device.cuda.walks import PARTIAL, CudaPendingPaths, TreeWalks, empty_partial
from hearth.runtime.device.cuda.wide_draws import (
    BIAS,
    HISTORY,
    ROW,
    THREADS,
    SettingsRow,
    Stages,
    WideDraws,
    is_greedy,
    row_biases,
    row_settings,
)
from hearth.runtime.device.device import MOST_GPU_ROWS, SamplerBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.request import RowRequest, check_options
from hearth.runtime.sampling import TokenMasks
from hearth.runtime.tensors.tensor import Tensor

# `Turn` of csrc/sampling/rows.cuh: number, rows that are done, and those that are live.
_WORDS, _LIVE = 4, 8

Draw = Callable[[SampleSlot, int], CudaPendingSamples]
"""Call that queues the work behind the scan of a number of rows, with results in the slot."""


class CudaCapturedSampler:
    """Scans as part of captured steps, and the draws of rows behind them.

    A captured launch has no argument for its slot of results: host and device count slots alike.
    """

    def __init__(
        self,
        memory: CudaMemory,
        stream: CudaStream,
        ring: SampleRing,
        *,
        batch: ctypes.Structure,
        scan: tuple[KernelLaunch, int],
        draw: Draw,
    ) -> None:
        self._turn = memory.zeros("turn of samples", (_WORDS,), np.dtype(np.int32)).address
        self._stream, self._ring = stream, ring
        self._batch, self._scan, self._draw = batch, scan, draw
        self._rows = 0

    def expect(self, rows: int) -> None:
        """Write the number of rows for the scans, if it has changed."""
        if rows != self._rows:
            self._stream.fill(self._turn + _LIVE, rows)
            self._rows = rows

    def queue(self, rows: int) -> None:
        """Queue a scan of all rows."""
        batch, (launch, blocks) = self._batch, self._scan
        batch.results = self._ring.address
        batch.first, batch.picked, batch.turn = 0, rows, self._turn
        try:
            launch.launch_dependent(blocks, rows)
        finally:
            batch.turn = 0

    def samples(self) -> CudaPendingSamples:
        """Take the slot of the launch, and queue the draws of rows."""
        return self._draw(self._ring.take(), self._rows)


_THREADS = 256
_PIECE = 1 << 14


class RowTables:
    """Tables of the sampler per row and token: counts and bias.

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


_SCAN_THREADS = 256
# A block of the scan reads this many logits at least; more blocks than that serve no purpose.
_SCAN_LOGITS, _SCAN_BLOCKS = 2048, 64
_STATE_BYTES = 16
_MASK_BITS = 32
# As many as a `SampleRing` has.
_MASK_SLOTS = 4
# SLOTS of csrc/sampling/rows.cuh.
CAPTURED_SLOTS = 4


class BatchArguments(ctypes.Structure):
    """`Batch` of csrc/sampling/rows.cuh."""

    _fields_ = (
        *addresses("logits start next_tokens rows history bias masks partial state results"),
        *integers("vocab pitch first picked"),
        *addresses("turn"),
        *integers("capacity words"),
    )


class TokenMoves(ctypes.Structure):
    """`Moves` of csrc/sampling/rows.cuh."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("source", ctypes.c_int32 * MOST_GPU_ROWS),
        ("target", ctypes.c_int32 * MOST_GPU_ROWS),
    )


class CudaBatchSampler:
    """Sampler on the device: one launch for greedy rows, a second if a row draws.

    Top-k, top-p and the likeliest tokens take a third. Nothing here waits for the device; results
    are read by `CudaPendingSamples` and `CudaPendingPaths`.
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
        self._stages = Stages([])
        self._greedy: list[bool] = []
        self._wanted: list[int] = []
        self._logprobs: dict[int, int] = {}
        self._turn = 0
        wanted = -(-self._vocab_size // _SCAN_LOGITS)
        self._blocks = min(_SCAN_BLOCKS, wanted)
        self._prepare(library, memory, buffers)

    def reorder(self, reorder: BatchReorder) -> None:
        """Let rows move with histories, settings and newest tokens; take the settings of new rows.

        Raises `invalid_value` naming a new row's setting.
        """
        if reorder.rows > self._capacity:
            raise HearthError("internal", f"{reorder.rows} rows exceed {self._capacity}")
        settings = reorder.settle(self._rows, lambda row: self._settings(row.request))
        moves = reorder.moves
        self._tables.move([move[:2] for move in moves if settings[move.target][-1]])
        if moves:
            table = self._moves
            table.count = len(moves)
            for i, (source, target, _) in enumerate(moves):
                table.source[i], table.target[i] = source, target
            self._move_tokens.launch(1)
        for place, row in reorder.assignments:
            flags = settings[place][-1]
            if flags & HISTORY:
                self._tables.count(place, row.request)
            if flags & BIAS:
                self._tables.set_bias(place, *row_biases(row.options))
        self._take(settings)

    def sample(
        self,
        rows: int,
        first: int = 0,
        picked: int | None = None,
        masks: TokenMasks = (),
    ) -> CudaPendingSamples:
        """Queue sampling of the first `picked` rows from place `first` on; check the others."""
        picked = rows if picked is None else picked
        if not (0 <= picked <= rows and 0 <= first <= len(self._rows) - rows):
            raise HearthError("internal", f"cannot sample {rows} rows from place {first} on")
        if masks:
            self._take_masks(first, masks)
        slot = self._slots.take()
        batch = self._batch
        batch.results = slot.address
        batch.first, batch.picked = first, picked
        if rows:
            self._scan.launch(self._blocks, rows)
        return self._pending(slot, rows, first, picked)

    def _draw_captured(self, slot: SampleSlot, rows: int) -> CudaPendingSamples:
        batch = self._batch
        batch.results = slot.address
        batch.first, batch.picked = 0, rows
        return self._pending(slot, rows, 0, rows)

    def _pending(self, slot: SampleSlot, rows: int, first: int, picked: int) -> CudaPendingSamples:
        """Draw behind the scan of these rows."""
        stage, jobs = self._stages.of(first, first + picked)
        if stage:
            self._wide.launch(self._draws[:stage], picked, jobs)
        places, asked = range(first, first + picked), self._logprobs.items()
        wanted = {place - first: count for place, count in asked if place in places}
        return CudaPendingSamples(slot, self._stream, rows, wanted)

    def verify(self, rows: int, width: int, masks: Sequence[TokenMasks] = ()) -> CudaPendingPaths:
        """Queue the walks of the first rows' trees; raises `internal` without trees.

        Only the first of a row's masks is used: its walk ends behind node 0.
        """
        if masks:
            self._take_masks(0, [nodes[0] if nodes else None for nodes in masks])
        if self._walks is None or not 0 <= rows <= len(self._rows):
            raise HearthError("internal", f"cannot verify the trees of {rows} rows")
        greedy = all(self._greedy[:rows])
        stages = self._stages.of(0, rows)
        return self._walks.launch(width, self._wanted[:rows], self._blocks, stages, greedy=greedy)

    def _take_masks(self, first: int, masks: TokenMasks) -> None:
        """Let the next launch read the masks of the rows from place `first` on."""
        self._turn = (self._turn + 1) % _MASK_SLOTS
        slot: NDArray[np.uint32] = self._masks.array[self._turn]
        for place, mask in enumerate(masks, first):
            if mask is not None:
                slot[place] = mask
        self._batch.masks = self._masks.address + self._turn * slot.nbytes

    def _settings(self, request: RowRequest) -> SettingsRow:
        check_options(request.options, self._vocab_size)
        return row_settings(request.options, self._vocab_size)

    def _prepare(self, library: KernelLibrary, memory: CudaMemory, buffers: SamplerBuffers) -> None:
        tables = self._tables
        partial = memory.zeros("sampling partial results", (self._capacity,), PARTIAL)
        state = memory.zeros("sampling state", (self._capacity, _STATE_BYTES), np.dtype(np.uint8))
        self._ring.upload(partial.address, empty_partial(self._capacity))
        words = -(-self._vocab_size // _MASK_BITS)
        # Kernels read them from the host's memory: a copy of each row's would hold the stream up
        # between a forward step and its picks. A slot is read until its samples are.
        shape = (_MASK_SLOTS, self._capacity, words)
        self._masks = memory.pinned_zeros("token masks", shape, np.dtype(np.uint32))
        self._batch = BatchArguments(
            buffers.logits.address,
            buffers.lengths.address,
            buffers.next_tokens.address,
            self._device_rows.address,
            tables.history.address,
            tables.bias.address,
            self._masks.address,
            partial.address,
            state.address,
            0,
            self._vocab_size,
            tables.pitch,
            capacity=self._capacity,
            words=words,
        )
        multiprocessors = library.context.properties.multiprocessors
        self._wide = WideDraws(memory, self._vocab_size, multiprocessors)
        # Without fused multiply-add every score rounds as in NumPy.
        options = (f"-DINDEX={index_type(buffers.lengths.dtype, 'start')}", "--fmad=false")
        self._scan = library.prepare(
            "sampling/sampling", "find_best", options, _SCAN_THREADS, (self._batch,)
        )
        arguments = (self._batch, self._wide.arguments)
        self._draws = tuple(
            library.prepare("sampling/sampling", name, options, THREADS, arguments)
            for name in ("weigh_rows", "pick_rows")
        )
        self.captured_sampler = CudaCapturedSampler(
            memory,
            self._stream,
            SampleRing(library.context, memory, self._capacity, CAPTURED_SLOTS),
            batch=self._batch,
            scan=(self._scan, self._blocks),
            draw=self._draw_captured,
        )
        """Sampling of a decode step as part of its capture."""
        self._moves = TokenMoves()
        tokens = ctypes.c_uint64(buffers.next_tokens.address)
        self._move_tokens = library.prepare(
            "sampling/sampling", "move_tokens", options, 1, (tokens, self._moves)
        )
        self._walks: TreeWalks | None = None
        if buffers.trees is not None:
            self._walks = TreeWalks(
                library,
                memory,
                self._ring,
                buffers.trees,
                batch=self._batch,
                vocab_size=self._vocab_size,
                wide=self._wide,
                options=options,
            )

    def _take(self, settings: list[SettingsRow]) -> None:
        self._rows = settings
        self._stages = Stages(settings)
        self._greedy = [is_greedy(row) for row in settings]
        self._wanted = [row[8] for row in settings]
        self._logprobs = {row: count for row, count in enumerate(self._wanted) if count >= 0}
        if settings:
            self._ring.upload(self._device_rows.address, np.array(settings, ROW))
