"""A draft engine's graph against the draft's forward pass in NumPy."""

from pathlib import Path

import numpy as np

from tests.eagle_models import DraftReference
from tests.runtime.export.graph_driver import GraphDriver
from tests.runtime.export.trees import Array, random_trees

LENGTHS = (11, 6, 1)
WIDTH = 12
NODES, NEWEST = 8, 4
CAPACITY = 48


class Given:
    """Random inputs of three rows: committed tokens, padded to a common width, and a tree."""

    def __init__(self, vocabulary: int, hidden: int, taps: int) -> None:
        random = np.random.default_rng(1)
        self.ids = random.integers(3, vocabulary, (3, WIDTH))
        self.base_hidden = random.standard_normal((3, WIDTH, taps * hidden)) * 2
        self.tree = random_trees(3, NODES, vocabulary)
        self.tree_hidden = random.standard_normal((3, NODES, hidden)) * 2


def compare_draft(
    folder: Path, base: Path, tolerance: float, kind: type[GraphDriver] = GraphDriver
) -> None:
    """Compare a ragged batch's committed tokens and a tree behind them.

    `folder` is the base's, beside which lies `draft_model`, the draft of the model `base`. Rows
    that have rotary tables of their own get random ones.
    """
    driver = kind(folder / "draft", 3, capacity=CAPACITY)
    turns = np.random.default_rng(2).uniform(0, 9, driver.rope["rope_cos"].shape)
    if driver.config.use_context_dependent_rope:
        tables = {"rope_cos": np.cos(turns), "rope_sin": np.sin(turns)}
        driver.rope = {name: table.astype(np.float32) for name, table in tables.items()}
    given = Given(driver.config.vocab_size, driver.config.hidden_size, 3)
    _commit(driver, given, [slice(0, 5), slice(5, WIDTH)])
    newest = np.tile(np.arange(NODES - NEWEST, NODES), (3, 1))
    outputs = driver.run(
        given.tree.ids,
        driver.filled[:, None] + given.tree.depths,
        newest,
        given.tree.mask,
        hidden_states_input=np.zeros((3, NODES, driver.config.base_hidden_dim)),
        hidden_states_from_draft=given.tree_hidden,
    )
    assert outputs["logits"].shape == (3, NEWEST, driver.config.output_vocab_size)
    assert outputs["logits"].dtype == np.float32
    reference = DraftReference(folder.parent / "draft_model", base)
    for row, length in enumerate(LENGTHS):
        if driver.config.use_context_dependent_rope:
            reference.rope = np.cos(turns[row]), np.sin(turns[row])
        logits, hidden = _expected(reference, driver.table, given, row, length)
        np.testing.assert_allclose(outputs["logits"][row], logits[-NEWEST:], atol=tolerance)
        np.testing.assert_allclose(outputs["hidden_states"][row], hidden[-NEWEST:], atol=tolerance)


def _commit(driver: GraphDriver, given: Given, parts: list[slice]) -> None:
    """Feed the committed tokens by chunks; rows that are through get padding."""
    for part in parts:
        lengths = [len(range(*part.indices(length))) for length in LENGTHS]
        width = part.stop - part.start
        positions = driver.filled[:, None] + np.arange(width)
        driver.outputs = driver.run(
            given.ids[:, part],
            positions * (np.arange(width) < np.array(lengths)[:, None]),
            np.zeros((3, 1)),
            hidden_states_input=given.base_hidden[:, part],
            hidden_states_from_draft=np.zeros((3, width, driver.config.hidden_size)),
        )
        driver.commit(lengths)


def _expected(
    reference: DraftReference, table: Array, given: Given, row: int, length: int
) -> tuple[Array, Array]:
    tree, hidden = given.tree, given.tree_hidden.shape[-1]
    nodes = tree.ids.shape[1]
    ids = np.concatenate([given.ids[row, :length], tree.ids[row]])
    mask = np.tri(length + nodes, dtype=np.bool_)
    mask[length:, length:] = tree.mask[row]
    base = np.concatenate(
        [given.base_hidden[row, :length], np.zeros((nodes, given.base_hidden.shape[-1]))]
    )
    own = np.concatenate([np.zeros((length, hidden)), given.tree_hidden[row]])
    positions = np.concatenate([np.arange(length), length + tree.depths[row]])
    return reference.forward(table[ids].astype(np.float64), base, own, positions, mask)
