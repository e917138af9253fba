"""Rounds of speculation by the ops of a device, around a toy engine that shows every mistake.

The toy engine's key of a token is a number for (position, token); its state at a token is the
sum of the keys that the token sees, its own included. Value, hidden state and logits depend on
that state alone: so a wrong mask, position, slot or token changes all that follows.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder, RowMove
from hearth.runtime.device.cache_storage import CacheStorage
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.cpu.ops import CpuCacheStorage
from hearth.runtime.device.cpu.tree_ops import CpuTreeOps
from hearth.runtime.device.device import (
    AcceptedPath,
    Device,
    SamplerBuffers,
    StepBuffers,
    TreeBuffers,
    TreeOps,
)
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
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.sampling import RowSampler
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device.tree_reference import PlainProposal

VOCAB, HEADS, SLOTS, MOST_ACCEPTED, HIDDEN = 12, 2, 160, 24, 2
KEYS = np.random.default_rng(1).integers(1 << 50, size=(SLOTS, VOCAB))
SAMPLING = (
    RequestOptions(),
    RequestOptions(temperature=0.9, top_p=0.9, seed=3),
    RequestOptions(temperature=1.3, repetition_penalty=1.3, frequency_penalty=0.6, seed=4),
    RequestOptions(presence_penalty=0.8, logit_bias=((2, 1.0),)),
)
INT, ID = np.dtype(np.int64), np.dtype(np.int32)


@cache
def toy_logits(state: int) -> np.ndarray:
    logits: np.ndarray = np.random.default_rng(state).normal(scale=2, size=VOCAB)
    return logits.astype(np.float32)


def states(tokens: Sequence[int]) -> list[int]:
    """The state at each token of a text."""
    keys = [int(KEYS[position, token]) for position, token in enumerate(tokens)]
    return [sum(keys[: place + 1]) for place in range(len(keys))]


def vanilla(prompt: Sequence[int], params: RequestOptions, length: int) -> list[int]:
    """Prompt and continuation, one token after the other."""
    text, row = list(prompt), RowSampler(params, prompt, len(prompt), VOCAB)
    for _ in range(length):
        logits = toy_logits(states(text)[-1])
        token = row.pick(logits, int(logits.argmax()), len(text))
        assert token is not None
        row.accept(token)
        text.append(token)
    return text


def draw_tree(
    rng: np.random.Generator, width: int, continuation: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Ids and parents of a tree that often, but not always, holds what comes next."""
    ids, parents = [int(rng.integers(VOCAB))], [-1]
    right, depth = 0, 0
    for node in range(1, int(rng.integers(1, width + 1))):
        if depth < min(MOST_ACCEPTED, len(continuation)) - 1 and rng.random() < 0.25:
            ids.append(continuation[depth])
            parents.append(right)
            right, depth = node, depth + 1
        else:
            ids.append(int(rng.integers(VOCAB)))
            parents.append(int(rng.integers(node)))
    absent = width - len(ids)
    return ids + [int(rng.integers(VOCAB))] * absent, parents + [-2] * absent


def plain_walk(
    ids: Sequence[int], parents: Sequence[int], continuation: Sequence[int]
) -> list[int]:
    """The nodes that a walk along `continuation` visits."""
    children: dict[tuple[int, int], int] = {}
    for node in range(1, len(ids)):
        children.setdefault((parents[node], ids[node]), node)
    nodes = [0]
    while (nodes[-1], continuation[len(nodes) - 1]) in children:
        nodes.append(children[nodes[-1], continuation[len(nodes) - 1]])
    return nodes


class Rounds:
    """A batch of rows, its buffers, and rounds that are checked against plain decoding."""

    def __init__(
        self, device: Device, tree_ops: TreeOps, rng: np.random.Generator, rows: int, width: int
    ) -> None:
        self.ops, self.rng, self.rows, self.width = tree_ops, rng, rows, width
        prompts = [rng.integers(VOCAB, size=rng.integers(1, 12)).tolist() for _ in range(rows)]
        params = [SAMPLING[int(rng.integers(len(SAMPLING)))] for _ in range(rows)]
        self.lengths = [len(prompt) for prompt in prompts]
        self.texts = [vanilla(*row, 60) for row in zip(prompts, params, strict=True)]
        # One buffer is wider than the round, as where rounds of several widths share it.
        size = width + 3
        self.trees = TreeBuffers(
            ids=Tensor.zeros("ids", (rows, size), ID),
            parents=Tensor.zeros("parents", (rows, size), ID),
        )
        newest = np.array([prompt[-1] for prompt in prompts], np.int32)
        self.step = StepBuffers(
            embedding=Tensor("embedding", np.arange(VOCAB)[:, None]),
            next_tokens=Tensor("next_tokens", newest),
            inputs_embeds=Tensor.zeros("inputs_embeds", (rows, size, 1), INT),
            attention_pos_id=Tensor.zeros("attention_pos_id", (rows, size), INT),
            last_token_ids=Tensor.zeros("last_token_ids", (rows, size), INT),
            lengths=Tensor("kvcache_start_index", np.array(self.lengths) - 1),
            tree_mask=Tensor.zeros("tree_mask", (rows, size, size), np.dtype(np.bool_)),
        )
        self.logits = Tensor.zeros("logits", (rows, size, VOCAB), np.dtype(np.float32))
        self.sampler = device.batch_sampler(
            SamplerBuffers(self.logits, self.step.lengths, self.step.next_tokens, self.trees)
        )
        self.sampler.reorder(
            BatchReorder.fresh(
                [
                    RowRequest(
                        token_ids=prompt,
                        prompt_length=len(prompt),
                        options=structs.replace(one, max_tokens=99),
                    )
                    for prompt, one in zip(prompts, params, strict=True)
                ]
            )
        )
        shape = (rows, HEADS, SLOTS, 1)
        self.keys, self.values = Tensor.zeros("k", shape, INT), Tensor.zeros("v", shape, INT)
        self.storage: CacheStorage = device.cache_storage([self.keys, self.values], HEADS, 1)
        self.hidden = Tensor.zeros("hidden_states", (rows, size, HIDDEN), INT)
        self.accepted = Tensor.zeros("accepted", (rows, MOST_ACCEPTED, HIDDEN), INT)
        for row, length in enumerate(self.lengths):
            self._fill_cache(row, length - 1)

    def round(self) -> list[list[int]]:
        """One round, checked; the nodes that each row accepted."""
        wanted = self._plant()
        self.ops.feed_verify(self.step, self.trees, self.rows, self.width)
        self._run_engine()
        starts = self.step.lengths.array[: self.rows].tolist()
        paths = self.sampler.verify(self.rows, self.width).result()
        nodes = [self._check_path(row, path, wanted[row]) for row, path in enumerate(paths)]
        table = np.full((self.rows, MOST_ACCEPTED), -1, np.int32)
        for row, path in enumerate(nodes):
            table[row, : len(path)] = path
        self.storage.commit_path(table, starts, SLOTS)
        self.ops.gather_rows(self.hidden, self.width, table, self.accepted)
        self.gained = self.accepted.view((self.rows, MOST_ACCEPTED, HIDDEN))
        for row, path in enumerate(nodes):
            self.lengths[row] += len(path)
            self._check_row(row, len(path))
        filled = self.step.lengths.array[: self.rows].tolist()
        assert filled == [length - 1 for length in self.lengths]
        return nodes

    def evict(self, row: int) -> None:
        """Let a row leave; those behind it move up."""
        kept = [number for number in range(self.rows) if number != row]
        moves = [RowMove(old, new, self.lengths[old]) for new, old in enumerate(kept)]
        self.storage.move(moves, (SLOTS, SLOTS))
        self.sampler.reorder(BatchReorder(len(kept), moves))
        self.step.lengths.array[: len(kept)] = self.step.lengths.array[kept]
        self.texts = [self.texts[old] for old in kept]
        self.lengths = [self.lengths[old] for old in kept]
        self.rows = len(kept)

    def _plant(self) -> list[list[int]]:
        trees = []
        for text, length in zip(self.texts, self.lengths, strict=True):
            speculates = self.rng.random() < 0.9
            width = self.width if speculates else 1
            absent = self.width - width
            ids, parents = draw_tree(self.rng, width, text[length:])
            trees.append((ids + [0] * absent, parents + [-2] * absent))
        self.ops.upload_tree(
            self.trees,
            np.array([ids for ids, _ in trees], np.int32),
            np.array([parents for _, parents in trees], np.int32),
        )
        rests = [text[length:] for text, length in zip(self.texts, self.lengths, strict=True)]
        return [plain_walk(*tree, rest) for tree, rest in zip(trees, rests, strict=True)]

    def _run_engine(self) -> None:
        """Every node sees the filled slots and what the mask says; it writes its slot."""
        shape = (self.rows, self.width)
        tokens, positions = (
            self.step.inputs_embeds.view(shape),
            self.step.attention_pos_id.view(shape),
        )
        assert self.step.tree_mask is not None
        masks = self.step.tree_mask.view((*shape, self.width))
        hidden = self.hidden.view((*shape, HIDDEN))
        keys = KEYS[positions, tokens]
        # Nodes that are not there may hold anything: nobody must look at them.
        logits = self.logits.view((*shape, VOCAB))
        logits[:] = np.nan
        for row, start in enumerate(self.step.lengths.array[: self.rows].tolist()):
            filled = int(self.keys.array[row, 0, :start].sum())
            self.keys.array[row, :, start : start + self.width, 0] = keys[row]
            for node in np.flatnonzero(masks[row].any(axis=1)):
                state = filled + int(keys[row, masks[row, node]].sum())
                self.values.array[row, :, start + node] = state
                logits[row, node] = toy_logits(state)
                hidden[row, node] = [state, row]

    def _check_path(self, row: int, path: AcceptedPath | None, wanted: list[int]) -> list[int]:
        assert path is not None
        begin = self.lengths[row]
        tokens = [sample.token_id for sample in path.samples]
        assert tokens == self.texts[row][begin : begin + len(wanted)]
        assert path.nodes == wanted
        return path.nodes

    def _check_row(self, row: int, gained: int) -> None:
        length = self.lengths[row]
        text = self.texts[row][:length]
        filled = length - 1
        positions = np.arange(filled)
        for head in range(HEADS):
            assert np.array_equal(
                self.keys.array[row, head, :filled, 0], KEYS[positions, text[:filled]]
            )
            assert self.values.array[row, head, :filled, 0].tolist() == states(text[:filled])
        hidden = [[state, row] for state in states(text[:filled])[-gained:]]
        padding = [[0, 0]] * (MOST_ACCEPTED - gained)
        assert self.gained[row].tolist() == hidden + padding
        assert self.step.next_tokens.array[row] == text[-1]

    def _fill_cache(self, row: int, filled: int) -> None:
        text = self.texts[row][:filled]
        self.keys.array[row, :, :filled, 0] = KEYS[np.arange(filled), text]
        self.values.array[row, :, :filled, 0] = states(text)


WIDTHS = [1, 2, 9, 33, 40, 70]


def _play(seed: int, rows: int, width: int, ops: TreeOps | None = None) -> list[int]:
    """Three rounds; how many tokens each row gained in each."""
    device = CpuDevice()
    play = Rounds(device, ops or device.tree_ops, np.random.default_rng(seed), rows, width)
    return [len(nodes) for _ in range(3) for nodes in play.round()]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 32), st.integers(1, 4), st.sampled_from(WIDTHS))
def test_rounds_through_any_trees_are_plain_decoding(seed: int, rows: int, width: int) -> None:
    _play(seed, rows, width)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1 << 32), st.sampled_from(WIDTHS), st.integers(0, 3))
def test_rows_may_leave_between_rounds(seed: int, width: int, leaver: int) -> None:
    device = CpuDevice()
    play = Rounds(device, device.tree_ops, np.random.default_rng(seed), 4, width)
    play.round()
    play.evict(leaver)
    play.round()
    play.evict(0)
    assert len(play.round()) == 2


def test_the_rounds_go_deep_and_end_early() -> None:
    gained = [count for seed in range(6) for count in _play(seed, 4, 70)]
    assert min(gained) == 1
    assert max(gained) > 10


class _GatherInPlace(CpuTreeOps):
    """A defect: rows are gathered into the buffer they come from, the last row first."""

    def gather_rows(
        self, source: Tensor, width: int, index: NDArray[np.int32], out: Tensor
    ) -> None:
        rows, count = index.shape
        target = source.array.reshape(-1)[: rows * count * source.shape[-1]]
        dense = source.view((rows, width, source.shape[-1]))
        for row in reversed(range(rows)):
            picked = dense[row, index[row]] * (index[row] >= 0)[:, None]
            target.reshape(rows, count, -1)[row] = picked
        out.array[:] = target.reshape(out.shape)


def _swap_words(packed: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
    return UNPACK(packed[:, :, ::-1].copy(), width)


def _see_all_before(packed: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
    there = UNPACK(packed, width).any(axis=-1, keepdims=True)
    before: NDArray[np.bool_] = np.tri(width, dtype=np.bool_)
    return before & there


def _depth_is_the_index(packed: NDArray[np.int32]) -> NDArray[np.intp]:
    index: NDArray[np.intp] = np.tile(np.arange(packed.shape[1]), (len(packed), 1))
    return index


def _fails(ops: TreeOps | None = None, rows: int = 3) -> bool:
    try:
        for seed in range(5):
            _play(seed, rows, 40, ops)
    except AssertionError:
        return True
    return False


UNPACK = token_trees.unpack_mask


def test_hidden_states_gathered_in_place_are_caught() -> None:
    assert not _fails()
    assert _fails(_GatherInPlace())
    # One row alone is safe: it takes a batch to show.
    assert not _fails(_GatherInPlace(), rows=1)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("unpack_mask", _swap_words),
        ("unpack_mask", _see_all_before),
        ("node_depths", _depth_is_the_index),
    ],
)
def test_a_wrong_mask_or_position_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(token_trees, name, broken)
    assert _fails()


def test_a_path_that_is_not_committed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuCacheStorage, "commit_path", lambda *_: None)
    assert _fails()


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
