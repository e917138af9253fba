"""Entries of prompts that are appended beside rows whose trees are proposed."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import Stream
from hearth.runtime.engine_folder import DRAFT_FOLDER
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.export import ExportOptions
from hearth.runtime.export.options import resolve_dialect
from hearth.runtime.generation.deployment import load_deployment
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from hearth.runtime.runner.pipeline_io import PipelineIO
from hearth.runtime.runner.shared_resources import SharedResources
from hearth.runtime.speculation.draft_runner import DraftEntries, EagleDraftRunner, NewestEntries
from tests.runtime.arrangements import REQUEST
from tests.runtime.conftest import EngineFolders
from tests.runtime.kv_cache.arranged_rows import cache_view

EAGLE = EagleDraftingConfig(drafting_top_k=2, drafting_step=3, verify_tree_size=8)
TOKENS = list(range(3, 13))


class Draft:
    """A draft of so many rows, and random hidden states of a base at every place."""

    def __init__(self, folder: Path, rows: int, eagle: EagleDraftingConfig = EAGLE) -> None:
        self.eagle = eagle
        speculation = SpeculationOptions(method="eagle", eagle=eagle)
        found = load_deployment(folder, RuntimeOptions(speculation=speculation))
        assert found.draft is not None
        device, options = CpuDevice(), EngineOptions(threads=1)
        resources = SharedResources.create_for_llm(found.base, folder, device)
        draft = folder / DRAFT_FOLDER
        resources.add_draft(found.draft, draft, device)
        self.io = PipelineIO.create_for_llm(found.base, resources, device)
        executor = EngineExecutor.create_for_spec_decode_draft(draft, found.draft, options, device)
        trees = self.io.trees
        self.runner = EagleDraftRunner(found.draft, eagle, executor, resources, device, trees=trees)
        for hidden in (*self.io.step.hidden, *self.io.prompt.hidden):
            flat = hidden.array.reshape(-1, hidden.shape[2])
            flat[:] = np.random.default_rng(1).normal(size=flat.shape)
        for manager in resources.cache_managers:
            manager.reorder(BatchReorder.fresh([REQUEST] * rows))

    def prefill(self, begin: int, count: int, place: int) -> None:
        """Entries of tokens from `begin` on, with the hidden state of the same number."""
        entries = DraftEntries(
            np.array([TOKENS[begin : begin + count]]),
            [count],
            [begin],
            np.arange(begin, begin + count, dtype=np.int32)[None],
        )
        self.runner.execute_prefill_step(entries, self.io.prompt.hidden[0], place)

    def accept(self, begin: int) -> NDArray[np.int32]:
        """The next entry of place 0, from the tail of the base's hidden states, and its tree."""
        hidden, prompt = self.io.step.hidden[0], self.io.prompt.hidden[0]
        saved = self.io.waiting + 1
        self.runner.save_hidden(prompt, [begin], hidden, saved)
        entries = NewestEntries([[TOKENS[begin]]], [1], [begin], [[saved]])
        self.runner.propose(entries, hidden, [True], self.eagle.tree_size)
        ids: NDArray[np.int32] = self.io.trees.ids.view((1, self.eagle.tree_size)).copy()
        return ids


def test_a_prompt_beside_a_row_with_trees_has_the_entries_that_it_has_alone(
    tree_folders: EngineFolders, dialect: str
) -> None:
    folder = tree_folders("qwen3", dialect)
    alone = Draft(folder, 1)
    alone.prefill(0, 4, 0)
    tree = alone.accept(4)
    alone.prefill(5, 4, 0)
    wanted = alone.runner.caches.capture(0, 9).attention

    beside = Draft(folder, 3)
    beside.prefill(0, 3, 2)
    beside.prefill(0, 4, 0)
    beside.prefill(3, 2, 2)
    assert np.array_equal(beside.accept(4), tree)
    beside.prefill(5, 4, 2)
    assert beside.runner.caches.row_lengths == [5, 0, 9]
    for got, row in zip(beside.runner.caches.capture(2, 9).attention, wanted, strict=True):
        assert np.abs(got - row).max() < 1e-5
    first = beside.runner.caches.capture(0, 5).attention
    for got, row in zip(first, wanted, strict=True):
        assert np.abs(got - row[:, :5]).max() < 1e-5


@pytest.mark.skipif(
    resolve_dialect(ExportOptions()) != "native", reason="this ONNX Runtime reads opset 23 at most"
)
def test_a_narrow_chunk_leaves_nothing_of_what_padded_steps_wrote_behind_it(
    tree_folders: EngineFolders,
) -> None:
    """A step of newest tokens, and a proposal's: the widest of both."""
    with patch("hearth.runtime.runner.bindings.decode_batches", lambda _: (1, 4)):
        draft = Draft(tree_folders("qwen3", "native"), 2)
    draft.prefill(0, 4, 1)
    caches = draft.runner.caches
    for tensor in caches.kv.keys + caches.kv.values:
        view = cache_view(caches.kv, tensor, 2)
        view[1, :, 4 : 4 + max(EAGLE.proposal_size, EAGLE.most_accepted)] = np.nan
    draft.prefill(4, 1, 1)
    assert caches.row_lengths == [0, 5]
    assert caches.finite(1)


@pytest.mark.parametrize("places", [[7], [9, 2, 30]])
def test_hidden_states_are_saved_behind_those_of_a_step(
    tree_folders: EngineFolders, dialect: str, places: list[int]
) -> None:
    draft = Draft(tree_folders("qwen3", dialect), 1)
    (hidden,), (prompt,) = draft.io.step.hidden, draft.io.prompt.hidden
    flat = hidden.array.reshape(-1, hidden.shape[2])
    before = flat.copy()
    first = draft.io.waiting + 1
    draft.runner.save_hidden(prompt, places, hidden, first)
    before[first : first + len(places)] = prompt.array.reshape(-1, prompt.shape[2])[places]
    assert np.array_equal(flat, before)


class _CapturedStep:
    """Work that is done anew each time that it is launched."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.launches, self.closed = work, 0, False

    def launch(self, _stream: Stream) -> None:
        self.launches += 1
        self.work()

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 4, 4)])
def test_entries_and_all_that_grows_are_one_launch_where_they_can_be_captured(
    tree_folders: EngineFolders, dialect: str, shape: tuple[int, int, int]
) -> None:
    eagle = EagleDraftingConfig(
        drafting_top_k=shape[0], drafting_step=shape[1], verify_tree_size=shape[2]
    )
    trees = []
    for recording in (False, True):
        draft = Draft(tree_folders("qwen3", dialect), 1, eagle)
        made: list[_CapturedStep] = []

        def record(work: Callable[[], None], made: list[_CapturedStep] = made) -> _CapturedStep:
            made.append(_CapturedStep(work))
            return made[-1]

        if recording:
            draft.runner._captured.takes_work = True
            with patch.object(CpuDevice, "record", lambda _, work: record(work)):
                draft.runner.capture_draft_proposal_graph([1], draft.io.step.hidden[0])
            draft.runner.caches.reorder(BatchReorder.fresh([REQUEST]))
        draft.prefill(0, 4, 0)
        trees.append(draft.accept(4))
        counters = draft.runner.executor.counters
        # Entries with the first step, and the levels with two more.
        assert sum(one.launches for one in made) == (1 if recording else 0)
        assert counters.hits == (3 if recording else 0)
        draft.runner.close()
        assert all(one.closed for one in made)
    assert np.array_equal(trees[0], trees[1])
