import ctypes

import numpy as np

from runtime.arrangement import Arrangement
from runtime.device.cuda.element_types import index_type
from runtime.device.cuda.launch import addresses, integers
from runtime.device.cuda.memory import CudaMemory
from runtime.device.cuda.programs import KernelLibrary
from runtime.device.cuda.recorded_picks import CudaRecordedPicks
from runtime.device.cuda.row_settings import (
    BIAS,
    HISTORY,
    ROW,
    SettingsRow,
    is_greedy,
    row_biases,
    row_settings,
)
from runtime.device.cuda.row_tables import RowTables
from runtime.device.cuda.sample_ring import CudaPendingSamples, SampleRing, SampleSlot
from runtime.device.cuda.upload import UploadRing
from runtime.device.cuda.walks import PARTIAL, CudaPendingPaths, TreeWalks, empty_partial
from runtime.device.cuda.wide_draws import THREADS, Stages, WideDraws
from runtime.device.device import MOST_GPU_ROWS, SamplerBuffers
from runtime.errors import HearthError
from runtime.request import RowRequest, check_options

_SCAN_THREADS = 256
# A block of the scan reads this many logits at least; more blocks than that serve no purpose.
_SCAN_LOGITS, _SCAN_BLOCKS = 2048, 64
_STATE_BYTES = 16
# SLOTS of csrc/sampling/rows.cuh.
RECORDED_SLOTS = 4


class BatchArguments(ctypes.Structure):
    """`Batch` of csrc/sampling/rows.cuh."""

    _fields_ = (
        *addresses("logits start next_tokens rows history bias partial state results"),
        *integers("vocab pitch first picked"),
        *addresses("turn"),
        *integers("capacity"),
    )


class TokenMoves(ctypes.Structure):
    """`Moves` of csrc/sampling/rows.cuh."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("source", ctypes.c_int32 * MOST_GPU_ROWS),
        ("target", ctypes.c_int32 * MOST_GPU_ROWS),
    )


class CudaBatchSampler:
    """Picks tokens on the device: one launch for greedy rows, a second where a row draws.

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
        wanted = -(-self._vocab_size // _SCAN_LOGITS)
        self._blocks = min(_SCAN_BLOCKS, wanted)
        self._prepare(library, memory, buffers)

    def rearrange(self, arrangement: Arrangement) -> None:
        """Let rows move with histories, settings and newest tokens, and take those of new rows.

        Raises `invalid_value` naming a new row's setting.
        """
        if arrangement.rows > self._capacity:
            raise HearthError("internal", f"{arrangement.rows} rows exceed {self._capacity}")
        settings = arrangement.settle(self._rows, lambda seat: self._settings(seat.request))
        moves = arrangement.moves
        self._tables.move([move[:2] for move in moves if settings[move.target][-1]])
        if moves:
            table = self._moves
            table.count = len(moves)
            for i, (source, target, _) in enumerate(moves):
                table.source[i], table.target[i] = source, target
            self._move_tokens.launch(1)
        for place, request, *_ in arrangement.seats:
            flags = settings[place][-1]
            if flags & HISTORY:
                self._tables.count(place, request)
            if flags & BIAS:
                self._tables.set_bias(place, *row_biases(request.options))
        self._take(settings)

    def sample(self, rows: int, first: int = 0, picked: int | None = None) -> CudaPendingSamples:
        """Queue the picks of the first `picked` rows from place `first` on; check the others."""
        picked = rows if picked is None else picked
        if not (0 <= picked <= rows and 0 <= first <= len(self._rows) - rows):
            raise HearthError("internal", f"cannot sample {rows} rows from place {first} on")
        slot = self._slots.take()
        batch = self._batch
        batch.results = slot.address
        batch.first, batch.picked = first, picked
        if rows:
            self._scan.launch(self._blocks, rows)
        return self._pending(slot, rows, first, picked)

    def _draw_recorded(self, slot: SampleSlot, rows: int) -> CudaPendingSamples:
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

    def verify(self, rows: int, width: int) -> CudaPendingPaths:
        """Queue the walks of the first rows' trees; raises `internal` where there are none."""
        if self._walks is None or not 0 <= rows <= len(self._rows):
            raise HearthError("internal", f"cannot verify the trees of {rows} rows")
        greedy = all(self._greedy[:rows])
        stages = self._stages.of(0, rows)
        return self._walks.launch(width, self._wanted[:rows], self._blocks, stages, greedy=greedy)

    def _settings(self, request: RowRequest) -> SettingsRow:
        check_options(request.options, self._vocab_size)
        return row_settings(request.options, self._vocab_size)

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
            capacity=self._capacity,
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
        self.recording = CudaRecordedPicks(
            memory,
            self._stream,
            SampleRing(library.context, memory, self._capacity, RECORDED_SLOTS),
            batch=self._batch,
            scan=(self._scan, self._blocks),
            draw=self._draw_recorded,
        )
        """The picks of a decode step as part of what is recorded."""
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
