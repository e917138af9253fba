"""Rounds of speculation by the ops of a device, around a toy engine that shows every mistake.

The toy engine's key of a token is a number for (position, token); its state at a token is the
sum of the keys that the token sees, its own included. Value, hidden state and logits depend on
that state alone: so a wrong mask, position, slot or token changes all that follows.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from msgspec import structs

from hearth.runtime.batch import BatchReorder, RowMove
from hearth.runtime.device.cache_storage import CacheStorage
from hearth.runtime.device.device import (
    AcceptedPath,
    Device,
    SamplerBuffers,
    StepBuffers,
    TreeBuffers,
    TreeOps,
)
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.sampling import RowSampler
from hearth.runtime.tensors.tensor import Tensor

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
