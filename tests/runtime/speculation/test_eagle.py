"""Trees and proposals of a draft engine, node for node against its forward pass in NumPy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from safetensors.numpy import load_file

from hearth.runtime.batch import BatchReorder, DecodingRow
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import TreeBuffers
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.generation.assembly import RuntimeParts, assemble
from hearth.runtime.generation.deployment import DeploymentConfig, load_deployment
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.speculation.eagle import EagleProposer
from hearth.runtime.tensors.tensor import Tensor
from tests.eagle_models import DraftReference
from tests.references import reference_folder
from tests.runtime.conftest import EngineFolders

Path_ = tuple[int, ...]
CHUNK = 8


class Planted(NamedTuple):
    """A tree as the proposer planted it, after `known` tokens."""

    known: list[int]
    nodes: set[Path_]


def _deployment(folder: Path, shape: tuple[int, int, int], chunk: int) -> DeploymentConfig:
    top_k, step, nodes = shape
    eagle = EagleDraftingConfig(drafting_top_k=top_k, drafting_step=step, verify_tree_size=nodes)
    speculation = SpeculationOptions(method="eagle", eagle=eagle, adaptive=False)
    found = load_deployment(folder, RuntimeOptions(speculation=speculation))
    assert found.draft is not None
    return found._replace(
        base=structs.replace(found.base, prefill_chunk=chunk),
        draft=structs.replace(found.draft, prefill_chunk=chunk),
    )


def _assemble(deployment: DeploymentConfig, folder: Path) -> RuntimeParts:
    return assemble(deployment, folder, EngineOptions(threads=1), CpuDevice())


def _watched(
    deployment: DeploymentConfig, folder: Path
) -> tuple[LLMInferenceRuntime, list[Planted]]:
    """A runtime, and the trees that it will plant."""
    parts = _assemble(deployment, folder)
    assert parts.speculation is not None
    proposer = parts.speculation.proposer
    assert isinstance(proposer, EagleProposer)
    planted: list[Planted] = []
    propose = proposer.propose

    def watch(
        rows: Sequence[DecodingRow], speculating: Sequence[bool], _trees: TreeBuffers
    ) -> list[int]:
        sizes, trees = propose(rows, speculating, _trees), _trees
        width = max(sizes)
        ids, parents = trees.ids.array, trees.parents.array
        for place, row in enumerate(rows):
            nodes = _paths(ids[place, :width].tolist(), parents[place, :width].tolist())
            planted.append(Planted(list(row.token_ids), nodes))
        return sizes

    proposer.propose = watch  # type: ignore[method-assign] # a spy
    return LLMInferenceRuntime(*parts[:4]), planted


def _paths(ids: Sequence[int], parents: Sequence[int]) -> set[Path_]:
    paths: list[Path_] = [()]
    for token, parent in zip(ids[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths)
    return set(paths)


class Truth:
    """Trees as EAGLE-2 grows them, one path at a time and without caches."""

    def __init__(self, folder: Path, name: str, shape: tuple[int, int, int]) -> None:
        self._shape = shape
        draft = folder.parent / "draft_model"
        self._draft = DraftReference(draft, reference_folder(name))
        offsets = load_file(draft / "model.safetensors")["d2t"]
        self._full_ids = np.arange(len(offsets)) + offsets
        self._parts = _assemble(_deployment(folder, shape, 64), folder)
        self._table: NDArray[np.float64] = np.asarray(
            self._parts.runner._resources.embedding.array, np.float64
        )

    def tree(self, known: list[int]) -> set[Path_]:
        top_k, steps, size = self._shape
        hidden = self._hidden(known[:-1])
        scored: dict[Path_, float] = {(): 0.0}
        level: list[tuple[Path_, float]] = [((), 0.0)]
        for _ in range(steps):
            grown = [
                ((*path, token), score + logp)
                for path, score in level
                for token, logp in self._best(known, hidden, path)
            ]
            scored |= dict(grown)
            level = sorted(grown, key=lambda one: -one[1])[:top_k]
        return set(sorted(scored, key=lambda path: -scored[path])[:size])

    def _hidden(self, tokens: list[int]) -> NDArray[np.float64]:
        runner = self._parts.runner
        runner.reset(1)
        runner.execute_prefill_step(np.array([tokens]), [len(tokens)])
        states = runner._prompt.hidden[0]
        return np.array(states.view((1, len(tokens), states.shape[2]))[0], np.float64)

    def _best(
        self, known: list[int], hidden: NDArray[np.float64], path: Path_
    ) -> list[tuple[int, float]]:
        """The best tokens after `path`: entries of the known text, then the path's own output."""
        entries, size = len(known) - 1, self._table.shape[1]
        own = np.zeros((entries + len(path), size))
        given = np.concatenate([hidden, np.zeros((len(path), hidden.shape[1]))])
        tokens = [*known[1:], *path]
        for place in range(entries, entries + len(path) + 1):
            mask = np.tril(np.ones((place, place), np.bool_))
            arrays = (self._table[tokens[:place]], given[:place], own[:place])
            logp, out = self._draft.forward(*arrays, np.arange(place), mask)
            if place < len(own):
                own[place] = out[-1]
        order = np.argsort(-logp[-1], kind="stable")[: self._shape[0]]
        return [(int(self._full_ids[one]), float(logp[-1, one])) for one in order]


def _requests(lengths: Sequence[int], seed: int = 0) -> list[RowRequest]:
    random = np.random.default_rng(seed)
    return [
        RowRequest(
            token_ids=random.integers(3, 60, length).tolist(),
            prompt_length=length,
            options=RequestOptions(
                max_tokens=6 + 3 * place, ignore_eos=True, temperature=5.0, seed=place
            ),
        )
        for place, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 4, 5), (3, 1, 4), (20, 2, 60)])
def test_trees_are_those_of_the_model(
    tree_folders: EngineFolders, dialect: str, shape: tuple[int, int, int]
) -> None:
    folder = tree_folders("qwen3", dialect)
    runtime, planted = _watched(_deployment(folder, shape, CHUNK), folder)
    # Rows of two chunks, of which the first leaves early: the others move up.
    runtime.admit(_requests([9, 16, 12]))
    while runtime.active:
        runtime.step()
    truth = Truth(folder, "qwen3", shape)
    assert len(planted) > 20
    for known, nodes in planted:
        assert nodes == truth.tree(known)
    if shape == (20, 2, 60):
        # So wide a tree of a draft that knows nothing meets some tokens by chance.
        assert len(runtime.speculation_metrics.accepted_by_position) > 1


def test_rows_that_join_later_keep_all_their_entries(
    tree_folders: EngineFolders, dialect: str
) -> None:
    folder = tree_folders("qwen3", dialect)
    runtime, planted = _watched(_deployment(folder, (2, 3, 8), CHUNK), folder)
    first, *others = _requests([5, 20, 1, 8, 30])
    runtime.admit([first, others[0]])
    kinds = []
    while runtime.active:
        kinds.append(runtime.step().kind)
        if len(kinds) in {2, 5, 6}:
            runtime.admit([others[1 + (len(kinds) > 2) + (len(kinds) > 5)]])
    # Prompts end between rounds of others: no row waits for a decode step, and none loses entries.
    assert "decode" not in kinds
    assert "verify" in kinds[: len(kinds) - kinds[::-1].index("prefill")]
    truth = Truth(folder, "qwen3", (2, 3, 8))
    assert len(planted) > 20
    for known, nodes in planted:
        assert nodes == truth.tree(known)


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
            reorder=lambda _reorder, _filled: None,
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
