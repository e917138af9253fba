from typing import Any

import numpy as np
import pytest

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import ProposalBuffers, StepBuffers, TreeBuffers
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device import tree_reference
from tests.runtime.device.tree_reference import PlainProposal

OPS = CpuDevice().tree_ops
FLOAT, ID = np.dtype(np.float32), np.dtype(np.int32)
ROWS, NODES, TOP_K, LEVELS, DRAFT_VOCAB, HIDDEN = 3, 40, 2, 3, 9, 2
SLOTS, TABLE = TOP_K * LEVELS, 1 + TOP_K + (LEVELS - 1) * TOP_K**2
FULL_IDS = [5, 1, 7, 3, 9, 11, 2, 0, 8]


def _full(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    """A buffer that still holds something from before."""
    return Tensor(name, np.ones(shape, dtype))


def _steps(index: type[Any] = np.int64, *, masked: bool = True) -> StepBuffers:
    number = np.dtype(index)
    mask = _full("tree_mask", (ROWS, NODES, NODES), np.dtype(np.bool_))
    return StepBuffers(
        embedding=Tensor("embedding", np.arange(24, dtype=np.float32).reshape(12, 2)),
        next_tokens=Tensor("next_tokens", np.array([4, 6, -1], np.int32)),
        inputs_embeds=_full("inputs_embeds", (ROWS, NODES, 2), FLOAT),
        attention_pos_id=_full("attention_pos_id", (ROWS, NODES), number),
        last_token_ids=_full("last_token_ids", (ROWS, NODES), number),
        lengths=Tensor("kvcache_start_index", np.array([10, 20, 30], index)),
        tree_mask=mask if masked else None,
        packed_mask=_full("packed_mask", (ROWS, NODES, 2), ID) if masked else None,
    )


def _trees() -> TreeBuffers:
    return TreeBuffers(
        ids=_full("ids", (ROWS, NODES), ID),
        parents=_full("parents", (ROWS, NODES), ID),
    )


def _proposal(*, own_vocabulary: bool = True) -> ProposalBuffers:
    ids, parents, entries = (
        _full(name, (ROWS, SLOTS), ID) for name in ("ids", "parents", "entries")
    )
    mapping = Tensor("full_ids", np.array(FULL_IDS, np.int32)) if own_vocabulary else None
    return ProposalBuffers(
        logits=_full("logits", (ROWS, TOP_K, DRAFT_VOCAB), FLOAT),
        hidden_states=_full("hidden_states", (ROWS, TOP_K, HIDDEN), FLOAT),
        hidden_states_from_draft=_full(
            "hidden_states_from_draft", (ROWS, SLOTS + 5, HIDDEN), FLOAT
        ),
        full_ids=mapping,
        ids=ids,
        parents=parents,
        entries=entries,
        table_ids=_full("table_ids", (ROWS, TABLE), ID),
        table_parents=_full("table_parents", (ROWS, TABLE), ID),
        table_scores=_full("table_scores", (ROWS, TABLE), FLOAT),
    )


@pytest.mark.parametrize("index", [np.int64, np.int32])
@pytest.mark.parametrize("width", [4, 33])
def test_a_verification_is_fed_from_the_planted_trees(index: type[Any], width: int) -> None:
    buffers, trees = _steps(index), _trees()
    parents = [
        [-1, 0, 0, 2] + [3] * (width - 4),
        [-1] + [-2] * (width - 1),
        list(range(-1, width - 1)),
    ]
    ids = np.arange(ROWS * width, dtype=np.int32).reshape(ROWS, width) % 12
    OPS.upload_tree(trees, ids, np.array(parents, np.int32))
    OPS.feed_verify(buffers, trees, ROWS, width)
    ids[:, 0] = [4, 6, -1]
    assert trees.ids.view((ROWS, width)).tolist() == ids.tolist()
    ids[np.array(parents) == -2] = 0
    assert (
        buffers.inputs_embeds.view((ROWS, width, 2))[..., 0].tolist() == (ids.clip(0) * 2).tolist()
    )
    assert buffers.last_token_ids.view((ROWS, width)).tolist() == [list(range(width))] * ROWS
    assert buffers.packed_mask is not None
    words = buffers.packed_mask.view((ROWS, width, -(-width // 32)))
    assert words.tolist() == [tree_reference.packed(row) for row in parents]
    assert buffers.tree_mask is not None
    mask = buffers.tree_mask.view((ROWS, width, width))
    assert mask.tolist() == [tree_reference.mask(row) for row in parents]
    wanted = [tree_reference.positions(row, 10 + 10 * i) for i, row in enumerate(parents)]
    assert buffers.attention_pos_id.view((ROWS, width)).tolist() == wanted


def test_an_engine_without_a_mask_is_fed_all_else() -> None:
    buffers, trees = _steps(masked=False), _trees()
    OPS.upload_tree(trees, np.array([[0, 3, 5]], np.int32), np.array([[-1, 0, 1]], np.int32))
    OPS.feed_verify(buffers, trees, 1, 3)
    assert buffers.attention_pos_id.view((1, 3)).tolist() == [[10, 11, 12]]
    assert buffers.inputs_embeds.view((1, 3, 2))[0, :, 0].tolist() == [8, 6, 10]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_proposal_grows_level_by_level_into_a_tree(rows: int) -> None:
    rng = np.random.default_rng(rows)
    proposal, trees = _proposal(), _trees()
    plain = [PlainProposal(TOP_K, FULL_IDS) for _ in range(rows)]
    hidden = np.zeros((rows, SLOTS, HIDDEN), np.float32)
    for step in range(LEVELS):
        asked = TOP_K if step else 1
        logits = proposal.logits.view((rows, asked, DRAFT_VOCAB))
        logits[:] = -rng.random(logits.shape)
        states = proposal.hidden_states.view((rows, asked, HIDDEN))
        states[:] = rng.random(states.shape)
        last = step == LEVELS - 1
        if step == 0:
            OPS.begin_proposal(proposal, rows, TOP_K)
        else:
            OPS.extend_proposal(proposal, rows, TOP_K, step - 1, last=last)
        for row, one in enumerate(plain):
            before = list(one.level)
            one.extend(logits[row])
            followed = [before.index(one.table[entry].parent) for entry in one.level]
            if not last:
                hidden[row, step * TOP_K : (step + 1) * TOP_K] = states[row, followed]
        assert np.array_equal(proposal.hidden_states_from_draft.view(hidden.shape), hidden)
    speculating = [True, False, True][:rows]
    OPS.finish_proposal(proposal, trees, speculating, 6)
    for row, (one, active) in enumerate(zip(plain, speculating, strict=True)):
        wanted = one.finish(6) if active else ([0] * 6, [-1] + [-2] * 5)
        found = trees.ids.view((rows, 6))[row], trees.parents.view((rows, 6))[row]
        assert (found[0].tolist(), found[1].tolist()) == wanted


def test_a_draft_step_is_fed_all_slots_and_selects_the_newest() -> None:
    buffers, proposal = _steps(), _proposal(own_vocabulary=False)
    logits = proposal.logits.view((2, 1, DRAFT_VOCAB))
    logits[:] = -9
    logits[0, 0, [4, 2]] = [-1, -2]
    logits[1, 0, [1, 8]] = [-2, -1]
    OPS.begin_proposal(proposal, 2, TOP_K)
    logits = proposal.logits.view((2, TOP_K, DRAFT_VOCAB))
    logits[:] = -9
    logits[0, 1, [0, 3]] = [-1, -1]
    logits[1, 0, 5] = logits[1, 1, 6] = -1
    OPS.extend_proposal(proposal, 2, TOP_K, 0, last=False)
    lengths = Tensor("lengths", np.array([50, 60, 0]))
    OPS.feed_proposal(buffers, proposal, lengths, (2, 2 * TOP_K, TOP_K))
    ids = [[4, 2, 0, 3, 0, 0], [8, 1, 5, 6, 0, 0]]
    parents = [[-1, -1, 1, 1, -2, -2], [-1, -1, 0, 1, -2, -2]]
    assert proposal.parents.array[:2].tolist() == parents
    assert (
        buffers.inputs_embeds.view((2, SLOTS, 2))[..., 0].tolist() == (np.array(ids) * 2).tolist()
    )
    assert buffers.attention_pos_id.view((2, SLOTS)).tolist() == [
        [50, 50, 51, 51, 0, 0],
        [60, 60, 61, 61, 0, 0],
    ]
    assert buffers.last_token_ids.view((2, TOP_K)).tolist() == [[2, 3], [2, 3]]
    assert buffers.tree_mask is not None
    mask = buffers.tree_mask.view((2, SLOTS, SLOTS))
    assert mask.tolist() == [tree_reference.mask(row) for row in parents]
    assert buffers.packed_mask is not None
    words = buffers.packed_mask.view((2, SLOTS, 1))
    assert words.tolist() == [tree_reference.packed(row) for row in parents]


def test_rows_are_gathered_between_buffers_of_another_width() -> None:
    source = Tensor("hidden_states", np.arange(48, dtype=np.float32).reshape(4, 6, 2))
    out = _full("accepted", (4, 3, 2), FLOAT)
    OPS.gather_rows(source, 5, np.array([[0, 4], [2, -1]], np.int32), out)
    # Seen as [2, 5, 2], row 1 begins with element 10.
    assert out.view((2, 2, 2)).tolist() == [[[0, 1], [8, 9]], [[14, 15], [0, 0]]]
    assert out.array.reshape(-1)[8:].tolist() == [1] * 16
