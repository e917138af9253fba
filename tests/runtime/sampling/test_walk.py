import numpy as np
import pytest

from hearth.runtime.request import RequestOptions
from hearth.runtime.sampling import RowSampler, Sample, child_keys, sample_rows, walk_tree

VOCAB = 10
GREEDY = RequestOptions()
IDS = [9, 3, 5, 4, 3, 7, 0]
PARENTS = [-1, 0, 0, 1, 0, 3, -2]
"""Behind the root tokens 3, 5 and 3 again; behind the first 3 token 4, and 7 behind that."""


def _keys(ids: list[int] = IDS, parents: list[int] = PARENTS) -> list[int]:
    (keys,) = child_keys(np.array([ids], np.int32), np.array([parents], np.int32))
    return keys


def _logits(picks: dict[int, int], width: int = len(IDS)) -> np.ndarray:
    """Logits [width, V] whose highest is `picks[node]` at each node, 8 elsewhere."""
    logits = np.random.default_rng(0).normal(size=(width, VOCAB)).astype(np.float32)
    for node in range(width):
        logits[node, picks.get(node, 8)] = 20
    return logits


def _row(params: RequestOptions = GREEDY) -> RowSampler:
    return RowSampler(params, [1, 2, 9], 2, VOCAB)


@pytest.mark.parametrize(
    ("picks", "tokens", "nodes"),
    [
        ({}, [8], [0]),
        ({0: 5}, [5, 8], [0, 2]),
        ({0: 3, 1: 6}, [3, 6], [0, 1]),
        ({0: 3, 1: 4, 3: 7, 5: 2}, [3, 4, 7, 2], [0, 1, 3, 5]),
        ({0: 3, 1: 4, 3: 3}, [3, 4, 3], [0, 1, 3]),
        ({0: 4}, [4], [0]),
        ({0: 0}, [0], [0]),
    ],
)
def test_a_walk_follows_the_picked_tokens(
    picks: dict[int, int], tokens: list[int], nodes: list[int]
) -> None:
    walk = walk_tree(_logits(picks), _keys(), _row(), 3)
    assert walk == ([Sample(token) for token in tokens], nodes)


def test_of_equal_children_the_first_is_walked() -> None:
    # The second 3 has a child too; it is never reached.
    keys = _keys([9, 3, 3, 4], [-1, 0, 0, 2])
    walk = walk_tree(_logits({0: 3, 1: 4, 2: 4}, 4), keys, _row(), 3)
    assert walk == ([Sample(3), Sample(4)], [0, 1])


def test_a_token_below_zero_is_nobodys_child() -> None:
    # Of a parent p and token -1, and of parent p - 1 and token 2**32 - 1, the sums are equal.
    assert walk_tree(_logits({0: 3}, 3), _keys([9, -1, 5], [-1, 0, 1]), _row(), 3) == (
        [Sample(3)],
        [0],
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_only_visited_nodes_need_finite_numbers(bad: float) -> None:
    logits = _logits({0: 3, 1: 4})
    logits[2, 5] = logits[6, 0] = bad
    assert walk_tree(logits, _keys(), _row(), 3) == (
        [Sample(3), Sample(4), Sample(8)],
        [0, 1, 3],
    )
    logits[1, 0] = bad
    assert walk_tree(logits, _keys(), _row(), 3) == ([Sample(3)], [0])
    logits[0, 0] = bad
    history = _row(RequestOptions(frequency_penalty=2.0))
    assert walk_tree(logits, _keys(), history, 3) is None
    logits[0] = _logits({0: 3})[0]
    assert walk_tree(logits, _keys(), history, 3) == ([Sample(3)], [0])


def test_scores_that_leave_float32_end_a_walk() -> None:
    row = _row(RequestOptions(logit_bias=((3, 100.0),)))
    logits = np.full((1, VOCAB), np.finfo(np.float32).max, np.float32)
    logits[0, 3] = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        low = _row(RequestOptions(repetition_penalty=0.01))
        assert walk_tree(logits, _keys([9], [-1]), low, 3) is None
    assert walk_tree(logits, _keys([9], [-1]), row, 3) == ([Sample(0)], [0])


@pytest.mark.parametrize(
    "params",
    [
        RequestOptions(temperature=1.5, seed=5, logprobs=2),
        RequestOptions(temperature=0.8, top_p=0.9, frequency_penalty=1.0, seed=6, logprobs=0),
        RequestOptions(repetition_penalty=1.8, logit_bias=((4, 3.0),)),
    ],
)
def test_a_token_is_picked_as_without_a_tree(params: RequestOptions) -> None:
    rng = np.random.default_rng(3)
    children = np.tile(np.arange(VOCAB), 3)
    ids = [9, *children.tolist()]
    for case in range(40):
        logits = rng.normal(size=(len(ids), VOCAB)).astype(np.float32) * 3
        # Behind the root every token, behind each of two nodes every token.
        above = [int(rng.integers(1, 11)), int(rng.integers(1, 11))]
        keys = _keys(ids, [-1, *[0] * 10, *[above[0]] * 10, *[above[1]] * 10])
        walk = walk_tree(logits, keys, _row(params), 3 + case)
        assert walk is not None
        alone = _row(params)
        for place, (sample, node) in enumerate(zip(*walk, strict=True)):
            (wanted,) = sample_rows(logits[node : node + 1], [alone], [3 + case + place])
            assert sample == wanted
            alone.accept(sample.token_id)
        assert len(walk[0]) >= 2


def test_all_picked_tokens_enter_the_history() -> None:
    params = RequestOptions(frequency_penalty=2.0, temperature=0.5, seed=2)
    row = _row(params)
    walk = walk_tree(_logits({0: 3, 1: 4}), _keys(), row, 3)
    assert walk is not None
    tokens = [sample.token_id for sample in walk[0]]
    assert len(tokens) == 3
    fresh = RowSampler(params, [1, 2, 9, *tokens], 2, VOCAB)
    flat = np.zeros((1, VOCAB), np.float32)
    for position in range(50):
        assert sample_rows(flat, [row], [position]) == sample_rows(flat, [fresh], [position])
