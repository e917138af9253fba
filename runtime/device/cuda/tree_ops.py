import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.cuda.element_types import copy_unit
from hearth.runtime.device.cuda.launch import KernelLaunch, addresses, integers
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.ops import check_mask, feed_arguments
from hearth.runtime.device.cuda.programs import KernelLibrary
from hearth.runtime.device.cuda.upload import UploadRing
from hearth.runtime.device.device import ChainBuffers, ProposalBuffers, StepBuffers, TreeBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor

_CHAIN_THREADS = 256
# A block searches so many logits; more blocks than that serve no purpose.
_CHAIN_EACH, _CHAIN_MOST_PARTS = 4096, 64


class ChainArguments(ctypes.Structure):
    """`Chain` of csrc/tree/chain.cu."""

    _fields_ = (
        *addresses("logits full_ids best done ids lengths filled fresh given"),
        *integers("vocab nodes width level"),
    )


class ChainStep:
    """The launch that takes a level's best tokens and feeds the draft's next step with them."""

    def __init__(self, library: KernelLibrary, memory: CudaMemory, buffers: ChainBuffers) -> None:
        step, rows = buffers.step, buffers.step.lengths.shape[0]
        vocab, size = buffers.logits.shape[-1], buffers.hidden_states.shape[-1]
        fresh, given = buffers.hidden_states, buffers.hidden_states_from_draft
        given.check((rows, 1, size))
        if fresh.dtype != given.dtype or buffers.lengths.dtype != step.lengths.dtype:
            raise HearthError("internal", "the buffers of a chain differ in type")
        best = memory.zeros("best of the draft", (rows,), np.dtype(np.uint64))
        pitch = size * fresh.dtype.itemsize
        nbytes, unit = copy_unit(pitch)
        self._rows, self._nodes = rows, buffers.trees.ids.shape[1]
        self._parts = min(_CHAIN_MOST_PARTS, -(-vocab // _CHAIN_EACH))
        self._arguments = ChainArguments(
            buffers.logits.address,
            0 if buffers.full_ids is None else buffers.full_ids.address,
            best.address,
            memory.zeros("chain blocks", (rows,), np.dtype(np.uint32)).address,
            buffers.trees.ids.address,
            buffers.lengths.address,
            step.lengths.address,
            fresh.address,
            given.address,
            vocab,
            0,
            pitch // nbytes,
        )
        self._feed, options = feed_arguments(step)
        self._launch = library.prepare(
            "tree/chain",
            "follow_chain",
            (*options, f"-DHIDDEN={unit}"),
            _CHAIN_THREADS,
            (self._feed, self._arguments),
        )

    def launch(self, rows: int, nodes: int, level: int) -> None:
        """Queue level `level` of chains of `nodes` nodes, the root included."""
        if not (0 < rows <= self._rows and 0 <= level <= nodes - 2 <= self._nodes - 2):
            raise HearthError("internal", f"{rows} chains of {nodes} nodes have no level {level}")
        self._arguments.nodes, self._arguments.level = nodes, level
        self._launch.launch_dependent(self._parts, rows)


MOST_TOP_K = 128
_PROPOSAL_THREADS, _WARP = 256, 32
# A block searches at least this many logits a thread; one warp merges the blocks of a row.
_PROPOSAL_EACH, _PROPOSAL_MOST_PARTS = 8, 32
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
        each = max(
            min(_PROPOSAL_EACH, -(-vocab // _PROPOSAL_THREADS)),
            -(-vocab // (_PROPOSAL_THREADS * _PROPOSAL_MOST_PARTS)),
        )
        self._parts = -(-vocab // (_PROPOSAL_THREADS * each))
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
            self._finish_tree.launch(-(-size * _WARP // _PROPOSAL_THREADS), rows)

    def _take(self, rows: int, top_k: int) -> None:
        if rows > self._rows or not 0 < top_k <= min(self._most_k, self._arguments.slots):
            raise HearthError("internal", f"no proposal of {top_k} tokens in {rows} rows")
        self._arguments.top_k = top_k

    def _prepare(self, library: KernelLibrary, options: tuple[str, ...]) -> None:
        proposal = (self._arguments,)
        self._begin = library.prepare(
            "tree/tree", "begin_tree", options, _PROPOSAL_THREADS, proposal
        )
        self._extend = library.prepare(
            "tree/tree", "extend_tree", options, _PROPOSAL_THREADS, proposal
        )
        self._finish_tree = library.prepare(
            "tree/tree", "finish_tree", options, _PROPOSAL_THREADS, (*proposal, self._finish)
        )


MOST_NODES = 1024
_FEED_THREADS = 128


class NodesArguments(ctypes.Structure):
    """`Nodes` of csrc/tree/feed.cu."""

    _fields_ = (*addresses("ids parents lengths"), *integers("first selected rooted"))


class TreeFeed:
    """The launch that fills a step of token trees: one block a node."""

    def __init__(
        self, library: KernelLibrary, buffers: StepBuffers, nodes: NodesArguments, most: int
    ) -> None:
        self._buffers = buffers
        self._nodes = nodes
        self._most = min(most, MOST_NODES)
        self._shape: tuple[int, int, range] | None = None
        self._feed, options = feed_arguments(buffers)
        self._launch = library.prepare(
            "tree/feed", "feed_nodes", options, _FEED_THREADS, (self._feed, nodes)
        )

    @classmethod
    def of_trees(
        cls, library: KernelLibrary, buffers: StepBuffers, trees: TreeBuffers
    ) -> "TreeFeed":
        """Steps that verify `trees`."""
        nodes = NodesArguments(
            trees.ids.address,
            trees.parents.address,
            buffers.lengths.address,
            rooted=1,
        )
        return cls(library, buffers, nodes, trees.ids.shape[1])

    @classmethod
    def of_proposal(
        cls,
        library: KernelLibrary,
        buffers: StepBuffers,
        proposal: ProposalBuffers,
        lengths: Tensor,
    ) -> "TreeFeed":
        """Draft steps; `lengths` [max batch] are the positions of the root's children."""
        if lengths.dtype != buffers.lengths.dtype:
            raise HearthError("internal", f"{lengths.name} is no index of the draft's steps")
        nodes = NodesArguments(proposal.ids.address, proposal.parents.address, lengths.address)
        return cls(library, buffers, nodes, proposal.ids.shape[1])

    def launch(self, rows: int, width: int, selected: range) -> None:
        """Queue a step of `width` nodes a row, of which `selected` get logits."""
        # Levels of a proposal and rounds differ in little: what is known to fit is not asked again.
        if (rows, width, selected) != self._shape:
            self._take_shape(rows, width, selected)
        if rows:
            self._launch.launch(rows * width)

    def _take_shape(self, rows: int, width: int, selected: range) -> None:
        buffers, nodes = self._buffers, self._nodes
        inside = selected.start >= 0 and selected.stop <= width
        if rows > buffers.lengths.shape[0] or not 0 < width <= self._most or not inside:
            raise HearthError("internal", f"{rows} rows of {width} nodes exceed a step's buffers")
        buffers.inputs_embeds.check((rows, width, buffers.inputs_embeds.shape[-1]))
        buffers.last_token_ids.check((rows, len(selected)))
        check_mask(buffers, rows, width)
        nodes.first, nodes.selected = selected.start, len(selected)
        self._feed.rows, self._feed.steps = rows, width
        self._shape = rows, width, selected


_THREADS = 128
_INT = np.dtype(np.int32)


class CudaTreeOps:
    """Ops that build token trees, one kernel each, prepared once for each set of buffers."""

    def __init__(self, library: KernelLibrary, memory: CudaMemory, ring: UploadRing) -> None:
        self._library, self._memory, self._ring = library, memory, ring
        self._feeds: dict[tuple[StepBuffers, object], TreeFeed] = {}
        self._proposals: dict[ProposalBuffers, CudaProposal] = {}
        self._chains: dict[ChainBuffers, ChainStep] = {}
        self._gathers: dict[str, KernelLaunch] = {}
        self._index: Tensor | None = None

    def upload_tree(
        self, trees: TreeBuffers, ids: NDArray[np.int32], parents: NDArray[np.int32]
    ) -> None:
        """Write trees [rows, width] of the host."""
        for tensor, array in ((trees.ids, ids), (trees.parents, parents)):
            tensor.check(array.shape)
            self._ring.upload(tensor.address, array.astype(_INT, copy=False))

    def feed_verify(self, buffers: StepBuffers, trees: TreeBuffers, rows: int, width: int) -> None:
        """Fill a step of the first `width` nodes of each row."""
        feed = self._feeds.get((buffers, trees))
        if feed is None:
            feed = TreeFeed.of_trees(self._library, buffers, trees)
            self._feeds[buffers, trees] = feed
        feed.launch(rows, width, range(width))

    def begin_proposal(self, proposal: ProposalBuffers, rows: int, top_k: int) -> None:
        """Table and first K slots from logits [rows, 1, Vd] and hidden [rows, 1, H]."""
        self._proposal(proposal).begin(rows, top_k)

    def feed_proposal(
        self,
        buffers: StepBuffers,
        proposal: ProposalBuffers,
        lengths: Tensor,
        shape: tuple[int, int, int],
    ) -> None:
        """Fill a draft step of all slots; `shape` is (rows, used, K), the last K selected."""
        rows, used, top_k = shape
        key = (buffers, (proposal, lengths))
        feed = self._feeds.get(key)
        if feed is None:
            feed = TreeFeed.of_proposal(self._library, buffers, proposal, lengths)
            self._feeds[key] = feed
        feed.launch(rows, proposal.ids.shape[1], range(used - top_k, used))

    def extend_proposal(
        self, proposal: ProposalBuffers, rows: int, top_k: int, level: int, *, last: bool
    ) -> None:
        """Enter K * K tokens into the table, and the best K of them into slots."""
        self._proposal(proposal).extend(rows, top_k, level, last=last)

    def finish_proposal(
        self, proposal: ProposalBuffers, trees: TreeBuffers, speculating: Sequence[bool], width: int
    ) -> None:
        """The best `width` entries of each table as a tree."""
        self._proposal(proposal).finish(trees, speculating, width)

    def draft_chain(self, chain: ChainBuffers, rows: int, nodes: int, level: int) -> None:
        """The best tokens as nodes of a level, and the draft's step behind them."""
        step = self._chains.get(chain)
        if step is None:
            step = self._chains[chain] = ChainStep(self._library, self._memory, chain)
        step.launch(rows, nodes, level)

    def gather_rows(
        self, source: Tensor, width: int, index: NDArray[np.int32], out: Tensor
    ) -> None:
        """Gather rows of H elements by an index of the host, with one upload and one launch."""
        rows, count = index.shape
        size = source.shape[-1]
        if source.dtype != out.dtype or out.shape[-1] != size or (index >= width).any():
            raise HearthError("internal", f"{out.name} cannot gather from {source.name}")
        source.check((rows, width, size))
        out.check((rows, count, size))
        if (index < 0).all():
            self._library.stream.zero(out.address, index.size * size * out.dtype.itemsize)
            return
        nbytes, unit = copy_unit(size * source.dtype.itemsize)
        launch = self._gathers.get(unit) or self._prepare_gather(unit)
        where = self._upload(index)
        units = size * source.dtype.itemsize // nbytes
        values = (source.address, out.address, where.address, count, width, units)
        for argument, value in zip(launch.arguments, values, strict=True):
            argument.value = value
        launch.launch(rows * count)

    def _proposal(self, buffers: ProposalBuffers) -> CudaProposal:
        proposal = self._proposals.get(buffers)
        if proposal is None:
            proposal = CudaProposal(self._library, self._memory, buffers)
            self._proposals[buffers] = proposal
        return proposal

    def _prepare_gather(self, unit: str) -> KernelLaunch:
        arguments = (*(ctypes.c_uint64() for _ in range(3)), *(ctypes.c_int32() for _ in range(3)))
        launch = self._library.prepare(
            "step/gather", "gather_rows", (f"-DUNIT={unit}",), _THREADS, arguments
        )
        self._gathers[unit] = launch
        return launch

    def _upload(self, index: NDArray[np.int32]) -> Tensor:
        where = self._index
        if where is None or where.shape[0] < index.size:
            where = self._index = self._memory.zeros("gathered rows", (2 * index.size,), _INT)
        self._ring.upload(where.address, index.astype(_INT, copy=False))
        return where
