from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.cpu.ops import embed
from hearth.runtime.device.device import ChainBuffers, ProposalBuffers, StepBuffers, TreeBuffers
from hearth.runtime.reference import token_trees
from hearth.runtime.reference.token_trees import top_k
from hearth.runtime.tensors.tensor import Tensor


class CpuTreeOps:
    """Ops that build token trees and the steps around them with NumPy on the calling thread."""

    def upload_tree(
        self, trees: TreeBuffers, ids: NDArray[np.int32], parents: NDArray[np.int32]
    ) -> None:
        """Copy trees [rows, width]."""
        trees.ids.view(ids.shape)[...] = ids
        trees.parents.view(parents.shape)[...] = parents

    def feed_verify(self, buffers: StepBuffers, trees: TreeBuffers, rows: int, width: int) -> None:
        """Fill a step of the first `width` nodes of each row, all of them selected."""
        ids = trees.ids.view((rows, width))
        ids[:, 0] = buffers.next_tokens.array[:rows]
        parents = trees.parents.view((rows, width))
        # Absent nodes are masked, and must be finite all the same.
        known = np.where(parents > token_trees.NO_NODE, ids, 0)
        _feed_tree(buffers, known, token_trees.pack_mask(parents), buffers.lengths.array[:rows])
        buffers.last_token_ids.view((rows, width))[...] = np.arange(width)

    def begin_proposal(self, proposal: ProposalBuffers, rows: int, top_k: int) -> None:
        """Table and first slots from logits [rows, 1, Vd] and hidden [rows, 1, H]."""
        token_trees.begin_proposal(
            _arrays(proposal, rows), _logits(proposal, rows, 1)[:, 0], _full_ids(proposal), top_k
        )
        token_trees.begin_hidden(*_hidden(proposal, rows, 1), top_k)

    def feed_proposal(
        self,
        buffers: StepBuffers,
        proposal: ProposalBuffers,
        lengths: Tensor,
        shape: tuple[int, int, int],
    ) -> None:
        """Fill a draft step of all slots; `shape` is (rows, used, K), the last K selected."""
        rows, used, top_k = shape
        ids, parents = proposal.ids.array[:rows], proposal.parents.array[:rows]
        packed = token_trees.pack_mask(parents)
        _feed_tree(buffers, ids, packed, lengths.array[:rows])
        buffers.last_token_ids.view((rows, top_k))[...] = np.arange(used - top_k, used)

    def extend_proposal(
        self, proposal: ProposalBuffers, rows: int, top_k: int, level: int, *, last: bool
    ) -> None:
        """Enter the tokens after the slots of `level`; the best of them become slots."""
        following = token_trees.extend_proposal(
            _arrays(proposal, rows),
            _logits(proposal, rows, top_k),
            _full_ids(proposal),
            level,
            last=last,
        )
        hidden, fresh = _hidden(proposal, rows, top_k)
        token_trees.extend_hidden(hidden, fresh, following, (level + 1) * top_k)

    def finish_proposal(
        self, proposal: ProposalBuffers, trees: TreeBuffers, speculating: Sequence[bool], width: int
    ) -> None:
        """Make trees of the best `width` entries; node 0 alone where a row is not speculating."""
        rows = len(speculating)
        found = token_trees.finish_proposal(
            _arrays(proposal, rows), np.array(speculating, np.bool_), width
        )
        self.upload_tree(trees, *found)

    def draft_chain(self, chain: ChainBuffers, rows: int, nodes: int, level: int) -> None:
        """The best tokens as nodes of a level, and the draft's step behind them."""
        logits = chain.logits.view((rows, chain.logits.shape[-1]))
        full_ids = None if chain.full_ids is None else chain.full_ids.array
        tokens = token_trees.map_ids(top_k(logits, 1), full_ids)
        chain.trees.ids.view((rows, nodes))[:, level + 1] = tokens[:, 0]
        if level + 2 == nodes:
            return
        step, size = chain.step, chain.hidden_states.shape[-1]
        fresh = chain.hidden_states.view((rows, size))
        chain.hidden_states_from_draft.view((rows, size))[...] = fresh
        step.lengths.array[:rows] += level > 0
        alone = np.ones((rows, 1, 1), np.int32)
        _feed_tree(step, tokens, alone, chain.lengths.array[:rows] + level)
        step.last_token_ids.view((rows, 1))[...] = 0

    def gather_rows(
        self, source: Tensor, width: int, index: NDArray[np.int32], out: Tensor
    ) -> None:
        """`out[b, i] = source[b, index[b, i]]`, zeros where the index is negative."""
        size = source.shape[-1]
        dense = source.view((len(index), width, size))
        token_trees.gather_rows(dense, index, out.view((*index.shape, size)))


def _feed_tree(
    buffers: StepBuffers, ids: NDArray[np.int32], packed: NDArray[np.int32], start: NDArray[Any]
) -> None:
    rows, width = ids.shape
    if buffers.tree_mask is not None:
        mask = buffers.tree_mask.view((rows, width, width))
        mask[...] = token_trees.unpack_mask(packed, width)
    if buffers.packed_mask is not None:
        buffers.packed_mask.view(packed.shape)[...] = packed
    positions = buffers.attention_pos_id.view((rows, width))
    token_trees.fill_tree_positions(positions, start, token_trees.node_depths(packed))
    embed(buffers, ids)


def _arrays(proposal: ProposalBuffers, rows: int) -> token_trees.Proposal:
    return token_trees.Proposal(
        *(
            tensor.array[:rows]
            for tensor in (
                proposal.ids,
                proposal.parents,
                proposal.entries,
                proposal.table_ids,
                proposal.table_parents,
                proposal.table_scores,
            )
        )
    )


def _logits(proposal: ProposalBuffers, rows: int, selected: int) -> NDArray[np.float32]:
    return proposal.logits.view((rows, selected, proposal.logits.shape[-1]))


def _hidden(
    proposal: ProposalBuffers, rows: int, selected: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    size = proposal.hidden_states_from_draft.shape[-1]
    hidden = proposal.hidden_states_from_draft.view((rows, proposal.ids.shape[1], size))
    return hidden, proposal.hidden_states.view((rows, selected, size))


def _full_ids(proposal: ProposalBuffers) -> NDArray[np.int32] | None:
    return None if proposal.full_ids is None else proposal.full_ids.array
