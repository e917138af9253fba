import ctypes
from collections.abc import Sequence

import numpy as np

from runtime.device.cuda.element_types import copy_unit
from runtime.device.cuda.launch import addresses, integers
from runtime.device.cuda.memory import CudaMemory
from runtime.device.cuda.programs import KernelLibrary
from runtime.device.device import ProposalBuffers, TreeBuffers
from runtime.errors import HearthError

MOST_TOP_K = 128
_THREADS, _WARP = 256, 32
# A block searches at least this many logits a thread; one warp merges the blocks of a row.
_EACH, _MOST_PARTS = 8, 32
_ROW_WORDS = 8
_WORD_BITS = 32


class ProposalArguments(ctypes.Structure):
    """`Proposal` of csrc/tree/tree.cu."""

    _fields_ = (
        *addresses(
            "logits full_ids ids parents entries table_ids table_parents table_scores "
            "lists done hidden_out hidden"
        ),
        *integers("vocab slots size width top_k count level last"),
    )


class FinishArguments(ctypes.Structure):
    """`Finish` of csrc/tree/tree.cu."""

    _fields_ = (
        *addresses("ids parents"),
        ("width", ctypes.c_int32),
        ("speculating", ctypes.c_uint32 * _ROW_WORDS),
    )


class CudaProposal:
    """The kernels of one proposal: one launch each to begin, extend and finish it."""

    def __init__(
        self, library: KernelLibrary, memory: CudaMemory, buffers: ProposalBuffers
    ) -> None:
        self._rows, most_k, vocab = buffers.logits.shape
        slots, size = buffers.ids.shape[1], buffers.table_ids.shape[1]
        self._most_k = min(most_k, vocab, MOST_TOP_K)
        if self._rows > _ROW_WORDS * _WORD_BITS:
            raise HearthError("internal", f"no proposals of {self._rows} rows")
        each = max(min(_EACH, -(-vocab // _THREADS)), -(-vocab // (_THREADS * _MOST_PARTS)))
        self._parts = -(-vocab // (_THREADS * each))
        lists = (self._rows, most_k, self._parts, most_k)
        hidden = buffers.hidden_states_from_draft
        hidden.check((self._rows, slots, buffers.hidden_states.shape[-1]))
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
            memory.zeros("tree blocks", (self._rows,), np.dtype(np.uint32)).address,
            buffers.hidden_states.address,
            hidden.address,
            vocab,
            slots,
            size,
            pitch // nbytes,
            count=self._parts,
        )
        self._finish = FinishArguments()
        self._prepare(library, (f"-DUNIT={unit}", f"-DEACH={each}"))

    def begin(self, rows: int, top_k: int) -> None:
        """Root and K tokens from logits [rows, 1, Vd]."""
        self._take(rows, top_k)
        if rows:
            self._begin.launch(self._parts, rows)

    def extend(self, rows: int, top_k: int, level: int, *, last: bool) -> None:
        """K * K tokens from logits [rows, K, Vd]; raises `internal` beyond slots and table."""
        arguments = self._arguments
        slots, entries = (level + 1 + (not last)) * top_k, 1 + top_k + (level + 1) * top_k * top_k
        if slots > arguments.slots or entries > arguments.size:
            raise HearthError("internal", f"a proposal has no level {level} of {top_k} tokens")
        self._take(rows, top_k)
        arguments.level, arguments.last = level, last
        if rows:
            self._extend.launch(self._parts, rows * top_k)

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
            self._plant.launch(-(-size * _WARP // _THREADS), rows)

    def _take(self, rows: int, top_k: int) -> None:
        if rows > self._rows or not 0 < top_k <= min(self._most_k, self._arguments.slots):
            raise HearthError("internal", f"no proposal of {top_k} tokens in {rows} rows")
        self._arguments.top_k = top_k

    def _prepare(self, library: KernelLibrary, options: tuple[str, ...]) -> None:
        proposal = (self._arguments,)
        self._begin = library.prepare("tree/tree", "begin_tree", options, _THREADS, proposal)
        self._extend = library.prepare("tree/tree", "extend_tree", options, _THREADS, proposal)
        self._plant = library.prepare(
            "tree/tree", "finish_tree", options, _THREADS, (*proposal, self._finish)
        )
