import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.device.cuda.chain_step import ChainStep
from runtime.device.cuda.element_types import copy_unit
from runtime.device.cuda.launch import KernelLaunch
from runtime.device.cuda.memory import CudaMemory
from runtime.device.cuda.programs import KernelLibrary
from runtime.device.cuda.proposal import CudaProposal
from runtime.device.cuda.tree_feed import TreeFeed
from runtime.device.cuda.upload import UploadRing
from runtime.device.device import ChainBuffers, ProposalBuffers, StepBuffers, TreeBuffers
from runtime.errors import HearthError
from runtime.tensors.tensor import Tensor

_THREADS = 128
_INT = np.dtype(np.int32)


class CudaTreeOps:
    """Builds token trees with one kernel an op; prepared once for each set of buffers."""

    def __init__(self, library: KernelLibrary, memory: CudaMemory, ring: UploadRing) -> None:
        self._library, self._memory, self._ring = library, memory, ring
        self._feeds: dict[tuple[StepBuffers, object], TreeFeed] = {}
        self._proposals: dict[ProposalBuffers, CudaProposal] = {}
        self._chains: dict[ChainBuffers, ChainStep] = {}
        self._gathers: dict[str, KernelLaunch] = {}
        self._index: Tensor | None = None

    def plant(self, trees: TreeBuffers, ids: NDArray[np.int32], parents: NDArray[np.int32]) -> None:
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

    def follow_chain(self, chain: ChainBuffers, rows: int, nodes: int, level: int) -> None:
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
