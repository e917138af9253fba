import ctypes
from collections.abc import Sequence
from functools import cached_property
from math import prod
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.cuda.element_types import copy_unit, float_type, index_type
from hearth.runtime.device.cuda.launch import KernelLaunch, addresses, integers
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.programs import KernelLibrary
from hearth.runtime.device.cuda.upload import UploadRing
from hearth.runtime.device.cuda.walks import CudaPendingPaths
from hearth.runtime.device.device import PathShape, PendingPaths, StepBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.reference.token_trees import mask_words
from hearth.runtime.tensors.tensor import Tensor

_THREADS = 128
_LENGTHS = 256
_IDS = np.dtype(np.int64)


class FeedArguments(ctypes.Structure):
    """`Feed` of csrc/step/steps.cuh."""

    _fields_ = (
        *addresses("table embeds positions select start next_tokens token_ids mask packed"),
        ("table_pitch", ctypes.c_int64),
        ("embeds_pitch", ctypes.c_int64),
        *integers("vocab width steps rows"),
    )


class LengthsArguments(ctypes.Structure):
    """`Lengths` of csrc/step/steps.cu: a launch brings them along, without a copy."""

    _fields_ = (
        ("first", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("values", ctypes.c_int32 * _LENGTHS),
    )


class FoundArguments(ctypes.Structure):
    """`Found` of csrc/step/steps.cu."""

    _fields_ = (
        *addresses("entries paths tokens lengths"),
        *integers("pitch levels width live rows steps"),
    )


class _Feed:
    """The launches of one set of step buffers."""

    def __init__(self, library: KernelLibrary, memory: CudaMemory, buffers: StepBuffers) -> None:
        places = prod(buffers.inputs_embeds.shape) // buffers.embedding.shape[1]
        self.places = places
        # Behind the tokens come a length and a first position for each row.
        words = places + 2 * buffers.lengths.shape[0]
        self.token_ids = memory.zeros("prompt tokens", (words,), _IDS)
        self.arguments, options = feed_arguments(buffers)
        self.arguments.token_ids = self.token_ids.address
        kernels = [
            library.prepare("step/steps", name, options, _THREADS, (self.arguments,))
            for name in ("feed_prefill", "feed_decode")
        ]
        self.prefill, self.decode = kernels
        self._library, self._memory, self._options = library, memory, options
        self._buffers = buffers
        self._entries: dict[tuple[int, int], KernelLaunch] = {}

    @cached_property
    def entered(self) -> FeedArguments:
        """The arguments of steps of entries, which lie one behind the other from `token_ids` on.

        Behind the tokens come a length, a first position, the slots filled before and after for
        each row, and the places of hidden states.
        """
        words = 2 * self.places + 4 * self._buffers.lengths.shape[0]
        arguments, _ = feed_arguments(self._buffers)
        arguments.token_ids = self._memory.zeros("entries", (words,), _IDS).address
        return arguments

    @cached_property
    def found(self) -> KernelLaunch:
        """Launch that writes the entries of paths behind the entries that were put."""
        found = FoundArguments(self.entered.token_ids)
        return self._library.prepare("step/steps", "enter_paths", self._options, _THREADS, (found,))

    def entries(self, source: Tensor, out: Tensor, start: Tensor, grown: Tensor) -> KernelLaunch:
        """The launch that also copies rows of one buffer into another."""
        key = (source.address, out.address)
        launch = self._entries.get(key)
        if launch is None:
            pitch = source.shape[-1] * source.dtype.itemsize
            if source.dtype != out.dtype or out.shape[-1] != source.shape[-1]:
                raise HearthError("internal", f"{out.name} cannot gather from {source.name}")
            size, unit = copy_unit(pitch)
            where = (ctypes.c_uint64(one.address) for one in (source, out, start, grown))
            arguments = (self.entered, *where, ctypes.c_int32(pitch // size))
            options = (*self._options, f"-DHIDDEN={unit}")
            launch = self._library.prepare(
                "step/steps", "feed_entries", options, _THREADS, arguments
            )
            self._entries[key] = launch
        return launch


class CudaStepOps:
    """Ops that fill step inputs, one kernel each, prepared once for each set of step buffers."""

    def __init__(self, library: KernelLibrary, memory: CudaMemory, ring: UploadRing) -> None:
        self._library = library
        self._memory = memory
        self._ring = ring
        self._feeds: dict[StepBuffers, _Feed] = {}
        self._advances: dict[Tensor, KernelLaunch] = {}
        self._settings: dict[Tensor, KernelLaunch] = {}

    def feed_prefill(
        self,
        buffers: StepBuffers,
        token_ids: NDArray[np.int64],
        lengths: Sequence[int],
        first: Sequence[int] | None = None,
    ) -> None:
        """Feed embeddings [B, S], positions from `first` or the start on, and rows' last tokens."""
        feed = self._feed(buffers)
        rows, steps = token_ids.shape
        self._check(feed, buffers, rows, steps)
        if not token_ids.size:
            return
        places = [-1] * rows if first is None else first
        packed = np.concatenate((token_ids.reshape(-1), lengths, places)).astype(_IDS)
        self._ring.upload(feed.token_ids.address, packed)
        feed.arguments.rows, feed.arguments.steps = rows, steps
        feed.prefill.launch(rows * steps)

    def put_entries(
        self,
        buffers: StepBuffers,
        token_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
        first: Sequence[int],
        places: Sequence[Sequence[int]],
        *,
        filled: Sequence[int],
    ) -> None:
        """Upload the entries to the kernel's arguments."""
        feed = self._feed(buffers)
        self._check(feed, buffers, len(token_ids), len(token_ids[0]))
        words = [token for row in token_ids for token in row]
        words += [max(1, length) for length in lengths]
        words += first
        words += filled
        words += map(add, filled, lengths)
        words += [place for row in places for place in row]
        self._ring.upload(feed.entered.token_ids, np.array(words, _IDS))

    def enter_paths(
        self, buffers: StepBuffers, paths: PendingPaths, lengths: Tensor, shape: PathShape
    ) -> None:
        """Queue one launch that writes the entries found by the walks."""
        if not isinstance(paths, CudaPendingPaths):
            raise HearthError("internal", "these paths are not walked on the GPU")
        feed = self._feed(buffers)
        self._check(feed, buffers, shape.batch, shape.entries)
        found = feed.found.arguments[0]
        found.paths, found.tokens, found.pitch, found.levels = paths.where
        found.lengths, found.width = lengths.address, shape.width
        found.live, found.rows, found.steps = shape.rows, shape.batch, shape.entries
        feed.found.launch(1)

    def feed_entries(
        self,
        buffers: StepBuffers,
        source: Tensor,
        out: Tensor,
        grown: Tensor,
        shape: tuple[int, int],
    ) -> None:
        """Feed the entries that were put last with one launch, which may be captured."""
        feed = self._feed(buffers)
        self._check(feed, buffers, *shape)
        out.check((*shape, out.shape[-1]))
        feed.entered.rows, feed.entered.steps = shape
        feed.entries(source, out, buffers.lengths, grown).launch(shape[0] * shape[1])

    def feed_decode(self, buffers: StepBuffers, rows: int) -> None:
        """Feed the newest token of each row."""
        feed = self._feed(buffers)
        if rows > buffers.lengths.shape[0]:
            raise HearthError("internal", f"{rows} rows exceed a step's buffers")
        if rows:
            feed.decode.launch(rows)

    def set_lengths(self, start: Tensor, lengths: Sequence[int]) -> None:
        """Write the lengths, and 0 behind them."""
        launch = self._settings.get(start)
        if launch is None:
            launch = self._prepare(start, "set_lengths", LengthsArguments())
            self._settings[start] = launch
        size, arguments = start.shape[0], launch.arguments[1]
        every = [*lengths, *[0] * (size - len(lengths))]
        for first in range(0, size, _LENGTHS):
            part = every[first : first + _LENGTHS]
            arguments.first, arguments.count = first, len(part)
            arguments.values[: len(part)] = part
            launch.launch(1)

    def advance(self, start: Tensor, rows: int) -> None:
        """Add 1 to the first rows."""
        if not rows:
            return
        launch = self._advances.get(start)
        if launch is None:
            launch = self._prepare(start, "advance", ctypes.c_int32())
            self._advances[start] = launch
        launch.arguments[1].value = min(rows, start.shape[0])
        launch.launch(-(-rows // _THREADS))

    def _check(self, feed: _Feed, buffers: StepBuffers, rows: int, steps: int) -> None:
        if rows * steps > feed.places or rows > buffers.lengths.shape[0]:
            raise HearthError("internal", f"{rows} rows of {steps} tokens exceed a step's buffers")
        check_mask(buffers, rows, steps)

    def _prepare(self, start: Tensor, name: str, argument: Any) -> KernelLaunch:
        options = (f"-DINDEX={index_type(start.dtype, start.name)}", "-DUNIT=uint4")
        arguments = (ctypes.c_uint64(start.address), argument)
        return self._library.prepare("step/steps", name, options, _THREADS, arguments)

    def _feed(self, buffers: StepBuffers) -> _Feed:
        feed = self._feeds.get(buffers)
        if feed is None:
            feed = self._feeds[buffers] = _Feed(self._library, self._memory, buffers)
        return feed


def feed_arguments(buffers: StepBuffers) -> tuple[FeedArguments, tuple[str, ...]]:
    """The arguments and compiler options of steps with these buffers, which must agree in type."""
    table, embeds = buffers.embedding, buffers.inputs_embeds
    vocab, hidden = table.shape
    options, width = _options(buffers, hidden)
    arguments = FeedArguments(
        table.address,
        embeds.address,
        buffers.attention_pos_id.address,
        buffers.last_token_ids.address,
        buffers.lengths.address,
        buffers.next_tokens.address,
        0,
        0 if buffers.tree_mask is None else buffers.tree_mask.address,
        0 if buffers.packed_mask is None else buffers.packed_mask.address,
        hidden * table.dtype.itemsize,
        hidden * embeds.dtype.itemsize,
        vocab,
        width,
    )
    return arguments, options


def check_mask(buffers: StepBuffers, rows: int, steps: int) -> None:
    """Raise `internal` if the masks of [rows, steps] tokens do not fit."""
    if buffers.tree_mask is not None:
        buffers.tree_mask.check((rows, steps, steps))
    if buffers.packed_mask is not None:
        buffers.packed_mask.check((rows, steps, mask_words(steps)))


def _options(buffers: StepBuffers, hidden: int) -> tuple[tuple[str, ...], int]:
    """Compiler options for these types, and how many units a row has."""
    table, embeds = buffers.embedding, buffers.inputs_embeds
    index = index_type(buffers.lengths.dtype, buffers.lengths.name)
    if {buffers.attention_pos_id.dtype, buffers.last_token_ids.dtype} != {buffers.lengths.dtype}:
        raise HearthError("internal", "the index tensors of a step differ in type")
    if table.dtype == embeds.dtype:
        size, unit = copy_unit(hidden * table.dtype.itemsize)
        return (f"-DINDEX={index}", f"-DUNIT={unit}"), hidden * table.dtype.itemsize // size
    types = (float_type(table.dtype, table.name), float_type(embeds.dtype, embeds.name))
    return (f"-DINDEX={index}", "-DCONVERT", f"-DTABLE={types[0]}", f"-DOUT={types[1]}"), hidden
