import ctypes
from collections.abc import Sequence

import numpy as np

from runtime.device.cuda.element_types import copy_unit
from runtime.device.cuda.launch import KernelLibrary
from runtime.device.cuda.memory import CudaMemory
from runtime.device.device import ProposalBuffers, TreeBuffers
from runtime.errors import HearthError

MOST_TOP_K = 128
_TOP_THREADS, _TREE_THREADS, _FINISH_THREADS = 256, 1024, 256
# A part of a row's logits has this many at least, and a warp merges the parts of a row.
_PART, _MOST_PARTS = 2048, 32
_ROW_WORDS = 8
_WORD_BITS = 32


class ProposalArguments(ctypes.Structure):
    """`Proposal` of kernels/tree.cu."""

    _fields_ = (
        ("logits", ctypes.c_uint64),
        ("full_ids", ctypes.c_uint64),
        ("ids", ctypes.c_uint64),
        ("parents", ctypes.c_uint64),
        ("entries", ctypes.c_uint64),
        ("table_ids", ctypes.c_uint64),
        ("table_parents", ctypes.c_uint64),
        ("table_scores", ctypes.c_uint64),
        ("lists", ctypes.c_uint64),
        ("hidden_out", ctypes.c_uint64),
        ("hidden", ctypes.c_uint64),
        ("vocab", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("level", ctypes.c_int32),
        ("last", ctypes.c_int32),
    )


class FinishArguments(ctypes.Structure):
    """`Finish` of kernels/tree.cu."""

    _fields_ = (
        ("ids", ctypes.c_uint64),
        ("parents", ctypes.c_uint64),
        ("order", ctypes.c_uint64),
        ("node_of", ctypes.c_uint64),
        ("done", ctypes.c_uint64),
        ("width", ctypes.c_int32),
        ("speculating", ctypes.c_uint32 * _ROW_WORDS),
    )


class CudaProposal:
    """The kernels of one proposal: two launches to begin or to extend it, one to finish it."""

    def __init__(
        self, library: KernelLibrary, memory: CudaMemory, buffers: ProposalBuffers
    ) -> None:
        self._buffers = buffers
        self._rows, most_k, vocab = buffers.logits.shape
        slots, size = buffers.ids.shape[1], buffers.table_ids.shape[1]
        self._most_k = min(most_k, vocab, MOST_TOP_K)
        if self._rows > _ROW_WORDS * _WORD_BITS:
            raise HearthError("internal", f"no proposals of {self._rows} rows")
        self._parts = min(_MOST_PARTS, -(-vocab // _PART))
        lists = (self._rows, most_k, self._parts, most_k)
        tables = (self._rows, size)
        integer, word = np.dtype(np.int32), np.dtype(np.uint32)
        hidden = buffers.hidden_in
        hidden.check((self._rows, slots, buffers.hidden_out.shape[-1]))
        pitch = hidden.shape[-1] * hidden.dtype.itemsize
        nbytes, unit = copy_unit(pitch)
        self._arguments = ProposalArguments(
            buffers.logits.address,
            0 if buffers.full_ids is None else buffers.full_ids.address,
            buffers.ids.address,
            buffers.parents.address,
            buffers.entries.address,
            buffers.table_ids.address,
            buffers.table_parents.address,
            buffers.table_scores.address,
            memory.zeros("best of the draft", lists, np.dtype(np.uint64)).address,
            buffers.hidden_out.address,
            hidden.address,
            vocab,
            slots,
            size,
            pitch // nbytes,
        )
        self._finish = FinishArguments(
            order=memory.zeros("tree order", tables, integer).address,
            node_of=memory.zeros("tree nodes", tables, integer).address,
            done=memory.zeros("tree blocks", (self._rows,), word).address,
        )
        self._prepare(library, (f"-DUNIT={unit}",))

    def begin(self, rows: int, top_k: int) -> None:
        """Root and K tokens from logits [rows, 1, Vd]."""
        self._find(rows, 1, top_k)
        if rows:
            self._begin.launch(rows)

    def extend(self, rows: int, top_k: int, level: int, *, last: bool) -> None:
        """K * K tokens from logits [rows, K, Vd]; raises `internal` beyond slots and table."""
        arguments = self._arguments
        slots, entries = (level + 1 + (not last)) * top_k, 1 + top_k + (level + 1) * top_k * top_k
        if slots > arguments.slots or entries > arguments.size:
            raise HearthError("internal", f"a proposal has no level {level} of {top_k} tokens")
        self._find(rows, top_k, top_k)
        arguments.level, arguments.last = level, last
        if rows:
            self._extend.launch(rows)

    def finish(self, trees: TreeBuffers, speculating: Sequence[bool], width: int) -> None:
        """Trees of the best `width` entries; node 0 alone in rows that are not `speculating`."""
        rows, finish = len(speculating), self._finish
        size = self._arguments.size
        if rows > self._rows or not 0 < width <= size:
            raise HearthError("internal", f"a proposal cannot give {rows} trees of {width} nodes")
        trees.ids.check((rows, width))
        trees.parents.check((rows, width))
        finish.ids, finish.parents = trees.ids.address, trees.parents.address
        finish.width = width
        bits = sum(1 << row for row, speculates in enumerate(speculating) if speculates)
        for word in range(_ROW_WORDS):
            finish.speculating[word] = bits >> (word * _WORD_BITS) & 0xFFFFFFFF
        if rows:
            self._plant.launch(-(-size // _FINISH_THREADS), rows)

    def _find(self, rows: int, selected: int, top_k: int) -> None:
        arguments = self._arguments
        if rows > self._rows or not 0 < top_k <= min(self._most_k, arguments.slots):
            raise HearthError("internal", f"no proposal of {top_k} tokens in {rows} rows")
        arguments.top_k, arguments.count = top_k, self._parts
        self._span.value = -(-arguments.vocab // self._parts)
        if rows:
            self._top.launch(self._parts, rows * selected)

    def _prepare(self, library: KernelLibrary, options: tuple[str, ...]) -> None:
        self._span = ctypes.c_int32()
        proposal = (self._arguments,)
        self._top = library.prepare(
            "tree", "find_top", options, _TOP_THREADS, (*proposal, self._span)
        )
        self._begin = library.prepare("tree", "begin_tree", options, _TREE_THREADS, proposal)
        self._extend = library.prepare("tree", "extend_tree", options, _TREE_THREADS, proposal)
        self._plant = library.prepare(
            "tree", "finish_tree", options, _FINISH_THREADS, (*proposal, self._finish)
        )
