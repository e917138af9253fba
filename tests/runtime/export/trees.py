"""Random token trees, and engine folders that take them."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from tests.eagle_models import write_draft
from tests.references import reference_folder

Array = NDArray[Any]
TAPS = (0, 2, 3)
VOCABULARY = 96


class Trees(NamedTuple):
    """`parents` [B, N], -1 for the root; `mask` [B, N, N] and `depths` [B, N] follow from it."""

    ids: Array
    parents: Array
    mask: Array
    depths: Array

    def path(self, row: int, node: int) -> list[int]:
        """The nodes from the root to this one."""
        above = int(self.parents[row, node])
        return [*(self.path(row, above) if above >= 0 else []), node]


def random_trees(rows: int, nodes: int, vocabulary: int, seed: int = 0) -> Trees:
    """One tree a row, every node's parent somewhere before it."""
    random = np.random.default_rng(seed)
    parents = np.full((rows, nodes), -1)
    mask = np.tile(np.eye(nodes, dtype=np.bool_), (rows, 1, 1))
    for row in range(rows):
        for node in range(1, nodes):
            parents[row, node] = random.integers(node)
            mask[row, node] |= mask[row, parents[row, node]]
    ids = random.integers(3, vocabulary, (rows, nodes))
    return Trees(ids, parents, mask, mask.sum(-1) - 1)


def export_with_draft(
    model: str | Path,
    target: Path,
    *,
    verify: Literal["auto", "trees", "chains"] = "trees",
    **options: Any,
) -> Path:
    """An engine folder of a reference model, or one in a folder, with a draft of 96 tokens."""
    base = model if isinstance(model, Path) else reference_folder(model)
    draft = write_draft(base, target / "draft_model", form="offset", vocabulary=VOCABULARY)
    chosen = DraftOptions(folder=draft, eagle_layers=TAPS, verify=verify)
    export_model(base, target / "engine", ExportOptions(draft=chosen, **options))
    return target / "engine"
