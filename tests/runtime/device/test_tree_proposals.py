from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.reference import token_trees
from hearth.runtime.reference.token_trees import (
    Proposal,
    begin_hidden,
    begin_proposal,
    extend_hidden,
    extend_proposal,
    finish_proposal,
    map_ids,
)
from tests.runtime.device.tree_reference import PlainProposal

DRAFT_VOCAB = 12


class Shape(NamedTuple):
    rows: int
    top_k: int
    levels: int

    @property
    def table(self) -> int:
        return 1 + self.top_k + (self.levels - 1) * self.top_k**2


def _empty(shape: Shape) -> Proposal:
    """Arrays that still hold something from before."""
    slots, table = (shape.rows, shape.top_k * shape.levels), (shape.rows, shape.table)
    ids, parents, entries = (np.full(slots, 7, np.int32) for _ in range(3))
    return Proposal(
        ids=ids,
        parents=parents,
        entries=entries,
        table_ids=np.full(table, 7, np.int32),
        table_parents=np.full(table, 7, np.int32),
        table_scores=np.full(table, 7, np.float32),
    )


def _run(shape: Shape, steps: list[np.ndarray], full_ids: np.ndarray | None) -> Proposal:
    proposal = _empty(shape)
    begin_proposal(proposal, steps[0][:, 0], full_ids, shape.top_k)
    for level, logits in enumerate(steps[1:]):
        extend_proposal(proposal, logits, full_ids, level, last=level == shape.levels - 2)
    return proposal


def _plain(shape: Shape, steps: list[np.ndarray], full_ids: np.ndarray) -> list[PlainProposal]:
    plain = [PlainProposal(shape.top_k, full_ids.tolist()) for _ in range(shape.rows)]
    for row, one in enumerate(plain):
        for number, logits in enumerate(steps):
            one.extend(logits[row])
            one.slots += one.level if number < max(1, shape.levels - 1) else []
    return plain


def _steps(shape: Shape, seed: int, kind: str) -> list[np.ndarray]:
    """Log-probabilities [rows, 1 or K, Vd] of each draft step."""
    rng = np.random.default_rng(seed)
    steps = []
    for step in range(shape.levels):
        size = (shape.rows, 1 if step == 0 else shape.top_k, DRAFT_VOCAB)
        logits = -np.abs(rng.normal(size=size)).astype(np.float32)
        if kind == "ties":
            logits = np.round(logits)
        if kind in ODD_SHARE:
            odd = np.array([np.nan, -np.inf, 0.0, 1e-7, np.inf], np.float32)
            odd = odd[: 2 if kind == "failed" else None]
            logits = np.where(rng.random(size) < ODD_SHARE[kind], rng.choice(odd, size), logits)
        steps.append(logits)
    return steps


KINDS = st.sampled_from(["plain", "ties", "odd", "failed"])
ODD_SHARE = {"odd": 0.3, "failed": 0.9}
SHAPES = st.builds(Shape, st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))


@settings(deadline=None)
@given(SHAPES, st.integers(0, 999), KINDS)
def test_a_proposal_is_the_plain_one_entry_for_entry(shape: Shape, seed: int, kind: str) -> None:
    steps = _steps(shape, seed, kind)
    full_ids = np.random.default_rng(seed).permutation(50)[:DRAFT_VOCAB].astype(np.int32)
    proposal, plain = _run(shape, steps, full_ids), _plain(shape, steps, full_ids)
    for row, one in enumerate(plain):
        assert proposal.table_ids[row].tolist() == [entry.token for entry in one.table]
        assert proposal.table_parents[row].tolist() == [entry.parent for entry in one.table]
        assert proposal.table_scores[row].tolist() == [entry.score for entry in one.table]
        there = len(one.slots)
        entries = proposal.entries[row, :there].tolist()
        assert entries == one.slots
        assert proposal.ids[row, :there].tolist() == [one.table[e].token for e in entries]
        above = [one.table[entry].parent for entry in entries]
        wanted = [entries.index(entry) if entry else -1 for entry in above]
        assert proposal.parents[row, :there].tolist() == wanted
        assert (proposal.parents[row, there:] == -2).all()
        assert (proposal.ids[row, there:] == 0).all()


@settings(deadline=None)
@given(SHAPES, st.integers(0, 999), KINDS, st.data())
def test_the_best_entries_are_a_tree_whose_parents_come_first(
    shape: Shape, seed: int, kind: str, data: st.DataObject
) -> None:
    width = data.draw(st.integers(1, shape.table))
    steps = _steps(shape, seed, kind)
    proposal = _run(shape, steps, None)
    ids, parents = finish_proposal(proposal, np.ones(shape.rows, np.bool_), width)
    plain = _plain(shape, steps, np.arange(DRAFT_VOCAB))
    for row, one in enumerate(plain):
        assert (ids[row].tolist(), parents[row].tolist()) == one.finish(width)
    assert (parents[:, 1:] >= 0).all()
    assert (parents < np.arange(width)).all()
    assert {parents.dtype, ids.dtype} == {np.dtype(np.int32)}


@pytest.mark.parametrize("sure", [0.0, 1e-6])
def test_certain_tokens_do_not_come_before_their_parents(sure: float) -> None:
    # A child of log-probability 0 ties with its parent, and one above 0 would even pass it.
    shape = Shape(1, 3, 5)
    steps = []
    for step in range(shape.levels):
        logits = np.full((1, 1 if step == 0 else 3, DRAFT_VOCAB), -9, np.float32)
        logits[:, :, 4] = sure
        steps.append(logits)
    proposal = _run(shape, steps, None)
    _, parents = finish_proposal(proposal, np.ones(1, np.bool_), 8)
    assert parents[0, :6].tolist() == [-1, 0, 1, 2, 3, 4]
    assert proposal.table_scores.max() == 0


def test_no_score_is_a_negative_zero() -> None:
    shape = Shape(1, 2, 2)
    steps = [np.full((1, 1, DRAFT_VOCAB), -0.0, np.float32) for _ in range(2)]
    steps[1] = np.repeat(steps[1], 2, axis=1)
    proposal = _run(shape, steps, None)
    assert proposal.table_scores.tolist() == [[0.0] * shape.table]
    assert not np.signbit(proposal.table_scores).any()


def test_an_unstable_order_of_equal_scores_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_first(scores: np.ndarray, count: int) -> np.ndarray:
        return np.argsort(scores, axis=-1, kind="stable")[..., ::-1][..., :count]

    shape = Shape(1, 3, 3)
    steps = _steps(shape, 1, "ties")
    everyone = np.ones(1, np.bool_)
    (plain,) = _plain(shape, steps, np.arange(DRAFT_VOCAB))
    ids, _ = finish_proposal(_run(shape, steps, None), everyone, 9)
    assert ids[0].tolist() == plain.finish(9)[0]
    monkeypatch.setattr(token_trees, "top_k", last_first)
    ids, _ = finish_proposal(_run(shape, steps, None), everyone, 9)
    assert ids[0].tolist() != plain.finish(9)[0]


def test_rows_that_do_not_speculate_have_the_root_alone() -> None:
    shape = Shape(3, 2, 2)
    proposal = _run(shape, _steps(shape, 1, "plain"), None)
    ids, parents = finish_proposal(proposal, np.array([False, True, False]), 5)
    assert parents[::2].tolist() == [[-1, -2, -2, -2, -2]] * 2
    assert ids[::2].tolist() == [[0] * 5] * 2
    assert (parents[1] > -2).all()


def test_entries_that_were_never_made_come_last() -> None:
    shape = Shape(1, 2, 3)
    proposal = _empty(shape)
    begin_proposal(proposal, _steps(shape, 0, "plain")[0][:, 0], None, shape.top_k)
    ids, parents = finish_proposal(proposal, np.ones(1, np.bool_), shape.table)
    assert proposal.table_scores[0, 3:].tolist() == [-np.inf] * 8
    assert ids[0, 3:].tolist() == [0] * 8
    assert parents[0].tolist() == [-1, *[0] * 10]


def test_the_last_level_leaves_the_slots_alone() -> None:
    shape = Shape(2, 3, 3)
    steps = _steps(shape, 5, "plain")
    proposal = _empty(shape)
    begin_proposal(proposal, steps[0][:, 0], None, 3)
    first = extend_proposal(proposal, steps[1], None, 0, last=False)
    before = proposal.ids.copy()
    none = extend_proposal(proposal, steps[2], None, 1, last=True)
    assert (first.shape, none.shape) == ((2, 3), (2, 0))
    assert np.array_equal(proposal.ids, before)


def test_draft_ids_are_mapped_or_kept() -> None:
    full_ids = np.array([7, 3, 9], np.int32)
    assert map_ids(np.array([[2, 0]]), full_ids).tolist() == [[9, 7]]
    kept = map_ids(np.array([[2, 0]]), None)
    assert kept.tolist() == [[2, 0]]
    assert kept.dtype == np.int32


def test_a_slot_has_the_hidden_state_of_what_it_follows() -> None:
    hidden = np.full((2, 6, 2), np.nan, np.float32)
    begin_hidden(hidden, np.array([[[1, 2]], [[3, 4]]], np.float32), 2)
    assert hidden[:, :2].tolist() == [[[1, 2], [1, 2]], [[3, 4], [3, 4]]]
    assert (hidden[:, 2:] == 0).all()
    fresh = np.arange(10, 18, dtype=np.float32).reshape(2, 2, 2)
    extend_hidden(hidden, fresh, np.array([[1, 1], [1, 0]]), 2)
    assert hidden[:, 2:4].tolist() == [[[12, 13], [12, 13]], [[16, 17], [14, 15]]]
    assert hidden[0, :2].tolist() == [[1, 2], [1, 2]]
    assert (hidden[:, 4:] == 0).all()
