"""Plain forms of the tree ops, one Python loop each, that the vectorised ones are compared with."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

Tree = Sequence[int]
"""The parent of each node: -1 for a root, -2 where there is no node."""


def ancestors(parents: Tree, node: int) -> list[int]:
    """The node itself and what lies between it and its root; empty where there is no node."""
    path: list[int] = []
    while node >= 0 and parents[node] != -2:
        path.append(node)
        node = parents[node]
    return path


def mask(parents: Tree) -> list[list[bool]]:
    width = range(len(parents))
    return [[j in ancestors(parents, i) for j in width] for i in width]


def packed(parents: Tree) -> list[list[int]]:
    """Signed words, as int32 shows them."""
    rows = []
    for node in range(len(parents)):
        words = np.zeros(math.ceil(len(parents) / 32), np.uint32)
        for seen in ancestors(parents, node):
            words[seen // 32] |= np.uint32(1 << seen % 32)
        rows.append(words.view(np.int32).tolist())
    return rows


def positions(parents: Tree, start: int) -> list[int]:
    depths = [len(ancestors(parents, node)) - 1 for node in range(len(parents))]
    return [max(0, start + depth) if depth >= 0 else 0 for depth in depths]


def best(scores: Sequence[float], count: int) -> list[int]:
    known = [-math.inf if math.isnan(score) else score for score in scores]
    return sorted(range(len(known)), key=lambda i: (-known[i], i))[:count]


class Entry(NamedTuple):
    token: int
    parent: int
    score: np.float32


class PlainProposal:
    """A proposal of one row, entry by entry, as the issue describes it."""

    def __init__(self, count: int, full_ids: Sequence[int]) -> None:
        self.count = count
        self.full_ids = full_ids
        self.table = [Entry(0, -1, np.float32(0))]
        self.level: list[int] = [0]
        """Entries whose continuations come next."""
        self.slots: list[int] = []
        """The entry of each slot of the proposal tree."""

    def extend(self, logits: np.ndarray) -> None:
        """Enter the best tokens after each entry of the level, logits [entries, Vd]."""
        fresh = []
        for entry, row in zip(self.level, logits, strict=True):
            for draft_id in best(row.tolist(), self.count):
                logp = row[draft_id]
                logp = np.float32(-np.inf) if np.isnan(logp) else min(logp, np.float32(0))
                score = np.float32(self.table[entry].score + logp)
                fresh.append(len(self.table))
                self.table.append(Entry(self.full_ids[draft_id], entry, score))
        chosen = best([float(self.table[entry].score) for entry in fresh], self.count)
        self.level = [fresh[place] for place in chosen]

    def finish(self, width: int) -> tuple[list[int], list[int]]:
        chosen = best([float(entry.score) for entry in self.table], width)
        ids = [self.table[entry].token for entry in chosen]
        return ids, [-1, *(chosen.index(self.table[entry].parent) for entry in chosen[1:])]


@st.composite
def forests(draw: st.DrawFn, widths: st.SearchStrategy[int]) -> list[list[int]]:
    """Trees of one width: of one node, of many, with several roots, and with absent nodes."""
    width = draw(widths)
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        present = draw(st.integers(1, width))
        parents = [draw(st.integers(-1, node - 1)) for node in range(present)]
        rows.append(parents + [-2] * (width - present))
    return rows
