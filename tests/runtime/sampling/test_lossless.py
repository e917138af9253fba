"""Text through token trees has the distribution of text without them, and with a seed its tokens.

A toy model over eight tokens gives logits for each path; rounds go through trees until three
tokens are there. Samplers with a mistake in them must fail the same checks.
"""

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import cache

import msgspec
import numpy as np
import pytest

from hearth.runtime.request import NO_ROW, RequestOptions, RowToken
from hearth.runtime.sampling import RowSampler, child_keys, sample_rows, walk_tree
from hearth.runtime.sampling.row_sampler import uniforms
from tests.runtime.sampling import reference

VOCAB, LENGTH, DRAWS = 8, 3, 100_000
PROMPT = [5, 1, 1]
Path = tuple[int, ...]
PARAMS = RequestOptions(
    temperature=0.9,
    top_p=0.93,
    repetition_penalty=1.4,
    presence_penalty=0.3,
    frequency_penalty=0.8,
    logit_bias=((2, 0.7), (6, -0.4)),
    seed=20,
)
# Behind a root: three tokens, behind the first of them two, and one behind one of those.
TREE_IDS = [0, 2, 5, 1, 2, 7, 2]
TREE_PARENTS = [-1, 0, 0, 0, 1, 1, 4]
ROOT_ALONE = [-1] + [-2] * 6


@cache
def model(path: Path) -> np.ndarray:
    """Logits [V] behind the prompt and a path."""
    logits: np.ndarray = np.random.default_rng([7, *path]).normal(scale=1.5, size=VOCAB)
    return logits.astype(np.float32)


@cache
def tree_logits(root: Path) -> np.ndarray:
    """Logits of each node of the tree whose root is the newest token of a path."""
    paths: list[Path] = [root]
    for token, parent in zip(TREE_IDS[1:], TREE_PARENTS[1:], strict=True):
        paths.append((*paths[parent], token))
    return np.stack([model(path) for path in paths])


class Row(RowSampler):
    """A row whose picks are remembered.

    A pick depends on settings, history, logits and its random number; with that number it only
    ever grows, so between two numbers with one pick every number has that pick.
    """

    numbers = uniforms(PARAMS.seed or 0, 0, 4 * DRAWS + LENGTH + 4).tolist()
    known: dict[tuple[Path, int], list[tuple[float, float, int]]]

    def __init__(self) -> None:
        super().__init__(PARAMS, PROMPT, len(PROMPT), VOCAB)
        self.known = {}
        self.path: Path = ()
        self.rows: dict[Path, RowSampler] = {}

    def restart(self) -> None:
        self.path = ()

    def history(self) -> Path:
        return self.path

    def accept(self, token_id: int) -> None:
        self.path = (*self.path, token_id)

    def number_at(self, position: int) -> int:
        """The position whose random number is used."""
        return position

    def pick(self, logits: np.ndarray, best: int, position: int) -> int:
        position = self.number_at(position)
        number = self.numbers[position]
        spans = self.known.setdefault((self.history(), hash(logits.tobytes())), [])
        place = bisect(spans, (number, math.inf, 0)) - 1
        if place >= 0 and number <= spans[place][1]:
            return spans[place][2]
        return self._learn(spans, self._draw(logits, best, position), number)

    def _draw(self, logits: np.ndarray, best: int, position: int) -> int:
        path = self.history()
        if path not in self.rows:
            self.rows[path] = RowSampler(PARAMS, [*PROMPT, *path], len(PROMPT), VOCAB)
        token_id = self.rows[path].pick(logits, best, position)
        assert token_id is not None
        return token_id

    @staticmethod
    def _learn(spans: list[tuple[float, float, int]], token_id: int, number: float) -> int:
        for place, (low, high, token) in enumerate(spans):
            if token == token_id:
                spans[place] = (min(low, number), max(high, number), token)
                return token_id
        spans.append((number, number, token_id))
        spans.sort()
        return token_id


class OneNumberARound(Row):
    """A mistake: all nodes of a round share the random number of its first token."""

    first: int | None = None

    def restart(self) -> None:
        super().restart()
        self.first = None

    def number_at(self, position: int) -> int:
        self.first = position if self.first is None else self.first
        return self.first


class SharedPenalties(Row):
    """A mistake: all nodes of a round are picked with the history at its begin."""

    begin: Path = ()

    def restart(self) -> None:
        super().restart()
        self.begin = ()

    def history(self) -> Path:
        return self.begin


class ForcedGreedy(Row):
    """A mistake: the likeliest token at every node."""

    def _draw(self, logits: np.ndarray, best: int, position: int) -> int:
        del logits, position
        return best


class NumberOfTheDepthBefore(Row):
    """A mistake: the number of the position before, so that two rounds share one."""

    def number_at(self, position: int) -> int:
        return position - 1 if len(self.path) == 1 else position


def draw_text(row: Row, start: int, parents: Sequence[int] = TREE_PARENTS) -> Path:
    """Three tokens behind the prompt, by rounds, whose root has position `start`."""
    keys = KEYS[tuple(parents)]
    text: Path = ()
    row.restart()
    while len(text) < LENGTH:
        if isinstance(row, SharedPenalties):
            row.begin = text
        if isinstance(row, OneNumberARound):
            row.first = None
        walk = walk_tree(tree_logits(text), keys, row, start + 1 + len(text))
        assert walk is not None
        text += tuple(sample.token_id for sample in walk[0])
    return text[:LENGTH]


def _key(parents: Sequence[int]) -> list[int]:
    return child_keys(np.array([TREE_IDS], np.int32), np.array([parents], np.int32))[0]


KEYS = {tuple(parents): _key(parents) for parents in (TREE_PARENTS, ROOT_ALONE)}


@cache
def exact() -> np.ndarray:
    """The probability of each text, by the plain reference: [V, V, V]."""
    chances = np.zeros((VOCAB,) * LENGTH)

    def spread(path: Path, chance: float) -> None:
        if len(path) == LENGTH:
            chances[path] = chance
            return
        scores = reference.adjusted(model(path).tolist(), PARAMS, [*PROMPT, *path], len(PROMPT))
        for token_id, share in reference.distribution(scores, PARAMS).items():
            spread((*path, token_id), chance * share)

    spread((), 1.0)
    return chances


def chi_square_excess(counts: np.ndarray, chances: np.ndarray) -> float:
    """Pearson's statistic above its 99.9999% quantile (Wilson and Hilferty 1931); inf where
    something impossible occurred. Texts that are expected less than five times count as one.
    """
    wanted = chances * counts.sum()
    if counts[wanted == 0].any():
        return math.inf
    common = wanted >= 5
    found = np.append(counts[common], counts[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    statistic = float(((found - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum())
    freedom = found.size - 1
    spread = 2 / (9 * freedom)
    return statistic - freedom * (1 - spread + 4.7534 * math.sqrt(spread)) ** 3


def _excess(row: Row, draws: int = DRAWS, parents: Sequence[int] = TREE_PARENTS) -> float:
    counts = np.zeros((VOCAB,) * LENGTH)
    for number in range(draws):
        counts[draw_text(row, 4 * number, parents)] += 1
    return chi_square_excess(counts, exact())


def test_the_exact_distribution_is_one() -> None:
    assert exact().sum() == pytest.approx(1)
    # Filters leave some texts out, and enough of them for the check to tell.
    assert 50 < np.count_nonzero(exact()) < VOCAB**LENGTH


@pytest.mark.parametrize("parents", [TREE_PARENTS, ROOT_ALONE], ids=["trees", "vanilla"])
def test_texts_have_the_exact_distribution(parents: list[int]) -> None:
    assert _excess(Row(), parents=parents) < 0


@pytest.mark.parametrize(
    "broken", [OneNumberARound, SharedPenalties, ForcedGreedy, NumberOfTheDepthBefore]
)
def test_a_mistaken_sampler_fails_the_same_check(broken: Callable[[], Row]) -> None:
    # A fifth of the draws is enough.
    assert _excess(broken(), DRAWS // 5) > 0


def test_remembered_picks_are_the_samplers_own() -> None:
    row = Row()
    for number in range(3000):
        draw_text(row, 4 * number)
    for number in range(3000, 3300):
        alone = RowSampler(PARAMS, PROMPT, len(PROMPT), VOCAB)
        assert draw_text(row, 4 * number) == _vanilla(alone, 4 * number + 1, LENGTH)


def _vanilla(row: RowSampler, position: int, length: int) -> Path:
    text: Path = ()
    while len(text) < length:
        (sample,) = sample_rows(model(text)[None], [row], [position + len(text)])
        assert sample is not None
        row.accept(sample.token_id)
        text += (sample.token_id,)
    return text


def _through_trees(row: RowSampler, position: int, length: int) -> tuple[Path, int]:
    """The text through a tree a round, and the rounds that it took."""
    text: Path = ()
    rounds = 0
    while len(text) < length:
        walk = walk_tree(tree_logits(text), KEYS[tuple(TREE_PARENTS)], row, position + len(text))
        assert walk is not None
        text += tuple(sample.token_id for sample in walk[0])
        rounds += 1
    return text[:length], rounds


@pytest.mark.parametrize(
    "params",
    [
        RequestOptions(temperature=1.0),
        RequestOptions(temperature=0.8, top_p=0.9, top_k=6, min_p=0.02),
        RequestOptions(temperature=1.2, repetition_penalty=1.5, frequency_penalty=0.5),
        RequestOptions(temperature=0.7, presence_penalty=-0.4, logit_bias=((2, 2.0), (0, -9.0))),
        RequestOptions(repetition_penalty=1.3, frequency_penalty=0.7),
        RequestOptions(),
    ],
)
def test_with_a_seed_the_text_is_the_one_without_trees(params: RequestOptions) -> None:
    length, rounds = 12, 0
    for seed in range(30):
        seeded = msgspec.structs.replace(params, seed=seed)
        rows = [RowSampler(seeded, PROMPT, len(PROMPT), VOCAB) for _ in range(2)]
        text, taken = _through_trees(rows[0], len(PROMPT), length)
        assert text == _vanilla(rows[1], len(PROMPT), length)
        rounds += taken
    # The trees were of use, else this would show nothing.
    assert rounds < 30 * length


WALK_VOCAB = 10
GREEDY = RequestOptions()
IDS = [9, 3, 5, 4, 3, 7, 0]
PARENTS = [-1, 0, 0, 1, 0, 3, -2]
"""Behind the root tokens 3, 5 and 3 again; behind the first 3 token 4, and 7 behind that."""


def _keys(ids: list[int] = IDS, parents: list[int] = PARENTS) -> list[int]:
    (keys,) = child_keys(np.array([ids], np.int32), np.array([parents], np.int32))
    return keys


def _logits(picks: dict[int, int], width: int = len(IDS)) -> np.ndarray:
    """Logits [width, V] whose highest is `picks[node]` at each node, 8 elsewhere."""
    logits = np.random.default_rng(0).normal(size=(width, WALK_VOCAB)).astype(np.float32)
    for node in range(width):
        logits[node, picks.get(node, 8)] = 20
    return logits


def _row(params: RequestOptions = GREEDY) -> RowSampler:
    return RowSampler(params, [1, 2, 9], 2, WALK_VOCAB)


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
    assert walk == ([RowToken(NO_ROW, token) for token in tokens], nodes)


def test_of_equal_children_the_first_is_walked() -> None:
    # The second 3 has a child too; it is never reached.
    keys = _keys([9, 3, 3, 4], [-1, 0, 0, 2])
    walk = walk_tree(_logits({0: 3, 1: 4, 2: 4}, 4), keys, _row(), 3)
    assert walk == ([RowToken(NO_ROW, 3), RowToken(NO_ROW, 4)], [0, 1])


def test_a_token_below_zero_is_nobodys_child() -> None:
    # Of a parent p and token -1, and of parent p - 1 and token 2**32 - 1, the sums are equal.
    assert walk_tree(_logits({0: 3}, 3), _keys([9, -1, 5], [-1, 0, 1]), _row(), 3) == (
        [RowToken(NO_ROW, 3)],
        [0],
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_only_visited_nodes_need_finite_numbers(bad: float) -> None:
    logits = _logits({0: 3, 1: 4})
    logits[2, 5] = logits[6, 0] = bad
    assert walk_tree(logits, _keys(), _row(), 3) == (
        [RowToken(NO_ROW, 3), RowToken(NO_ROW, 4), RowToken(NO_ROW, 8)],
        [0, 1, 3],
    )
    logits[1, 0] = bad
    assert walk_tree(logits, _keys(), _row(), 3) == ([RowToken(NO_ROW, 3)], [0])
    logits[0, 0] = bad
    history = _row(RequestOptions(frequency_penalty=2.0))
    assert walk_tree(logits, _keys(), history, 3) is None
    logits[0] = _logits({0: 3})[0]
    assert walk_tree(logits, _keys(), history, 3) == ([RowToken(NO_ROW, 3)], [0])


def test_scores_that_leave_float32_end_a_walk() -> None:
    row = _row(RequestOptions(logit_bias=((3, 100.0),)))
    logits = np.full((1, WALK_VOCAB), np.finfo(np.float32).max, np.float32)
    logits[0, 3] = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        low = _row(RequestOptions(repetition_penalty=0.01))
        assert walk_tree(logits, _keys([9], [-1]), low, 3) is None
    assert walk_tree(logits, _keys([9], [-1]), row, 3) == ([RowToken(NO_ROW, 0)], [0])


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
    children = np.tile(np.arange(WALK_VOCAB), 3)
    ids = [9, *children.tolist()]
    for case in range(40):
        logits = rng.normal(size=(len(ids), WALK_VOCAB)).astype(np.float32) * 3
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
    fresh = RowSampler(params, [1, 2, 9, *tokens], 2, WALK_VOCAB)
    flat = np.zeros((1, WALK_VOCAB), np.float32)
    for position in range(50):
        assert sample_rows(flat, [row], [position]) == sample_rows(flat, [fresh], [position])
