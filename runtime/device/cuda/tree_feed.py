import ctypes

from runtime.device.cuda.launch import addresses, integers
from runtime.device.cuda.ops import check_mask, feed_arguments
from runtime.device.cuda.programs import KernelLibrary
from runtime.device.device import ProposalBuffers, StepBuffers, TreeBuffers
from runtime.errors import HearthError
from runtime.tensors.tensor import Tensor

MOST_NODES = 1024
_THREADS = 128


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
            "tree/feed", "feed_nodes", options, _THREADS, (self._feed, nodes)
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
