import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from hearth.runtime.batch import DecodingRow
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import TreeBuffers
from hearth.runtime.options import SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.runner.pipeline_io import PipelineIO
from hearth.runtime.runner.shared_resources import SharedResources
from hearth.runtime.speculation.proposer import LookupProposer, NgramIndex
from tests.runtime.engine_configs import small_config

CONFIG = structs.replace(small_config(), max_verify_tree_size=4)
OPTIONS = SpeculationOptions(lookup_tokens=3)
REPEATS = [5, 6, 7, 8, 9, 5, 6]
NEW = [10, 11, 12, 13]


def _row(index: int, token_ids: list[int]) -> DecodingRow:
    request = RowRequest(
        token_ids=token_ids, prompt_length=len(token_ids), options=RequestOptions(max_tokens=9)
    )
    return DecodingRow(index, request, CONFIG.max_kv_cache_capacity, frozenset())


def _trees() -> TreeBuffers:
    device = CpuDevice()
    config = structs.replace(CONFIG, backend="simulated")
    resources = SharedResources.create_for_llm(config, Path(), device)
    return PipelineIO.create_for_llm(config, resources, device).trees


def _proposer(*, fixed_width: bool = False) -> LookupProposer:
    return LookupProposer(CpuDevice().tree_ops, OPTIONS, fixed_width=fixed_width)


def test_what_followed_before_is_planted_as_a_chain() -> None:
    rows, trees = [_row(0, REPEATS), _row(1, NEW)], _trees()
    assert _proposer().propose(rows, [True, True], trees) == [4, 1]
    assert trees.ids.view((2, 4))[0, 1:].tolist() == [7, 8, 9]
    assert trees.parents.view((2, 4)).tolist() == [[-1, 0, 1, 2], [-1, -2, -2, -2]]


@pytest.mark.parametrize(
    ("rows", "speculating", "ready"),
    [
        ([REPEATS, NEW], [True, True], True),
        ([REPEATS, NEW], [False, True], False),
        ([NEW], [True], False),
    ],
)
def test_a_round_needs_one_proposal(
    rows: list[list[int]], speculating: list[bool], *, ready: bool
) -> None:
    found = [_row(index, tokens) for index, tokens in enumerate(rows)]
    assert _proposer().ready(found, speculating) is ready


def test_new_tokens_are_read_and_rows_that_left_are_forgotten() -> None:
    proposer, row = _proposer(), _row(0, NEW)
    assert not proposer.ready([row], [True])
    row.token_ids += [10, 11]
    assert proposer.ready([row], [True])
    assert not proposer.ready([_row(0, NEW)], [True])
    assert len(proposer._rows) == 1


def test_trees_are_as_wide_as_the_longest_chain_or_as_the_graph() -> None:
    rows, trees = [_row(0, [5, 6, 5, 6])], _trees()
    assert _proposer().capture([1]) == [2, 3, 4]
    fixed = _proposer(fixed_width=True)
    assert fixed.capture([1]) == [fixed.room] == [4]
    assert fixed.propose([_row(0, NEW)], [True], trees) == [1]
    assert trees.parents.view((1, 4)).tolist() == [[-1, -2, -2, -2]]
    assert fixed.propose(rows, [True], trees) == [4]
    # The places behind are of no row, or of one whose prompt is not done: they get no tree.
    assert fixed.propose([rows[0], rows[0]], [True, True], trees) == [4, 4]
    assert fixed.propose([rows[0]], [True], trees) == [4]
    assert trees.parents.view((2, 4))[1].tolist() == [-1, -2, -2, -2]


texts = st.lists(st.integers(0, 2), max_size=40)


def naive(text: list[int], longest: int, shortest: int, count: int) -> list[int]:
    for n in range(min(longest, len(text)), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                grown = list(text)
                for place in range(count):
                    grown.append(grown[end + place])
                return grown[len(text) :]
    return []


@settings(deadline=None)
@given(texts, st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_proposals_equal_those_of_a_plain_search(
    text: list[int], longest: int, shortest: int, count: int
) -> None:
    index = NgramIndex(text, longest, min(shortest, longest))
    assert index.propose(count) == naive(text, longest, min(shortest, longest), count)


@settings(deadline=None)
@given(texts, texts)
def test_appending_in_pieces_is_the_same(first: list[int], second: list[int]) -> None:
    index = NgramIndex(first, 3, 1)
    index.propose(4)
    index.append(second)
    assert index.propose(4) == NgramIndex(first + second, 3, 1).propose(4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], [9, 5]),  # the longer occurrence, although older
        ([2, 3, 7, 2, 3, 8, 4, 2, 3], [8, 4]),  # of equal ones the latest
        ([5, 3, 7, 6, 3], []),  # one token alone is below the shortest
        ([4, 4, 4], [4, 4]),  # the occurrence overlaps the newest tokens
        ([1, 2, 3, 4], []),
        ([], []),
    ],
)
def test_the_longest_then_latest_occurrence_goes_on(text: list[int], expected: list[int]) -> None:
    assert NgramIndex(text, 3, 2).propose(2) == expected


def test_a_repetition_is_proposed_to_go_on_repeating() -> None:
    assert NgramIndex([9, 1, 2, 3, 1, 2], 2, 2).propose(7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_token_adds_at_most_as_many_nodes_as_the_longest_match() -> None:
    rng = random.Random(0)
    text = [rng.randrange(50_000) for _ in range(2_000)]
    index = NgramIndex(text, 3, 2)
    assert len(index._children) <= 3 * len(text)
