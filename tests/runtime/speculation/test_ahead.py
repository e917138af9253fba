"""A proposal that was queued before the paths of the round before it were known."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hearth.runtime.batch import BatchReorder, DecodingRow
from hearth.runtime.options import EagleDraftingConfig
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.speculation.eagle import EagleProposer
from hearth.runtime.tensors.tensor import Tensor

NODES = 4
TREES: Any = None
PATHS: Any = None


class Draft:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.caches = SimpleNamespace(
            lengths=np.zeros(2),
            row_lengths=[1, 1],
            batch=2,
            kv=SimpleNamespace(capacity=64),
            reorder=lambda _: None,
            zero_row=lambda _: None,
            zero_behind=lambda _: None,
        )

    def accept_shape(self, rows: int, _: int) -> tuple[int, int]:
        return rows, NODES

    def propose_ahead(self, rows: int, _paths: object, width: int) -> bool:
        self.calls.append(f"ahead {rows} {width}")
        return True

    def take_proposal(self, counts: Sequence[int], _wishes: Sequence[bool], _width: int) -> None:
        self.calls.append(f"take {list(counts)}")

    def propose(self, entries: Any, *_: object) -> None:
        self.calls.append(f"propose {entries.lengths}")


def make() -> tuple[EagleProposer, Any, list[DecodingRow]]:
    draft: Any = Draft()
    hidden = (Tensor.zeros("hidden", (2, NODES, 1), np.dtype(np.float32)),)
    io: Any = SimpleNamespace(
        step=SimpleNamespace(hidden=hidden), prompt=SimpleNamespace(hidden=hidden), waiting=8
    )
    eagle = EagleDraftingConfig(drafting_top_k=1, drafting_step=3, verify_tree_size=NODES)
    proposer = EagleProposer(draft, io, eagle)
    asked = RequestOptions(max_tokens=40)
    rows = [
        DecodingRow(
            number, RowRequest(token_ids=[5, 6], prompt_length=2, options=asked), 64, frozenset()
        )
        for number in range(2)
    ]
    for row in rows:
        row.filled = 2
        row.token_ids.append(7)
    proposer.stepped(rows)
    proposer.propose(rows, [True, True], TREES)
    draft.calls.clear()
    return proposer, draft, rows


def gain(proposer: EagleProposer, rows: Sequence[DecodingRow], nodes: list[list[int]]) -> None:
    for row, path in zip(rows, nodes, strict=True):
        row.filled += len(path)
        row.token_ids += [9] * len(path)
    proposer.accepted(rows, nodes, NODES)


def test_a_proposal_that_was_queued_ahead_is_taken_with_what_was_found() -> None:
    proposer, draft, rows = make()
    proposer.ahead(rows, [True, True], PATHS, NODES)
    gain(proposer, rows, [[0, 1, 2], [0]])
    assert proposer.propose(list(rows), [True, True], TREES) == [NODES, NODES]
    assert draft.calls == [f"ahead 2 {NODES}", "take [3, 1]"]
    # Once: the next round's entries are others.
    gain(proposer, rows, [[0], [0]])
    proposer.propose(rows, [True, True], TREES)
    assert draft.calls[2:] == ["propose [1, 1]"]


@pytest.mark.parametrize(
    "between",
    [
        lambda proposer, _: proposer.reorder(BatchReorder(2, [], [], [])),
        lambda proposer, rows: proposer.zero_row(0, rows[0]),
        lambda proposer, _: proposer.prefilled([], [], 1, 0),
    ],
    ids=["moved", "zeroed", "prefilled"],
)
def test_it_is_nothing_where_rows_changed(
    between: Callable[[EagleProposer, list[DecodingRow]], None],
) -> None:
    proposer, draft, rows = make()
    proposer.ahead(rows, [True, True], PATHS, NODES)
    gain(proposer, rows, [[0, 1, 2], [0]])
    waiting = dict(proposer._waiting)
    between(proposer, rows)
    proposer._waiting = waiting
    proposer.propose(rows, [True, True], TREES)
    assert draft.calls[1:] == ["propose [3, 1]"]


def test_it_is_nothing_where_fewer_rows_speculate() -> None:
    proposer, draft, rows = make()
    proposer.ahead(rows, [True, True], PATHS, NODES)
    gain(proposer, rows, [[0, 1, 2], [0]])
    assert proposer.propose(rows, [True, False], TREES) == [NODES, 1]
    assert draft.calls[1:] == ["propose [3, 1]"]


def test_nothing_is_queued_ahead_of_a_limit_that_the_round_may_reach() -> None:
    proposer, draft, rows = make()
    for left in (4, 5):
        rows[1].remaining_budget = left
        proposer.ahead(rows, [True, True], PATHS, NODES)
    assert draft.calls == [f"ahead 2 {NODES}"]


def test_a_decode_step_comes_before_it() -> None:
    proposer, draft, rows = make()
    proposer.ahead(rows, [True, True], PATHS, NODES)
    gain(proposer, rows, [[0, 1, 2], [0]])
    gain(proposer, rows, [[0], [0]])
    proposer.stepped(rows)
    proposer.propose(rows, [True, True], TREES)
    assert draft.calls[1:] == ["propose [1, 1]"]
