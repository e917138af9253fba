"""Numbers that are not finite in nodes that plain decoding never runs: they change no text."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from hearth.runtime.batch import DecodingRow
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import TreeBuffers
from hearth.runtime.device.mapped_tensors import map_tensor
from hearth.runtime.engine_folder import EMBEDDING_FILE
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.generation.assembly import assemble
from hearth.runtime.generation.deployment import load_deployment
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.generation.speculative import SpeculativeStrategy
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.reference.token_trees import NO_NODE
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.speculation.eagle import EagleProposer
from hearth.runtime.speculation.lookup_proposer import LookupProposer
from tests.runtime.export.trees import export_with_draft

POISON = 285
"""A token of no text; its embedding is made NaN, and with it its keys and values in all layers."""
PROMPTS = ([3, 9, 4], [7, 8, 9, 10, 11], [5])
Texts = dict[int, list[int]]


def request(tokens: int) -> GenerationRequest:
    options = RequestOptions(temperature=0, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(
        rows=[
            RowRequest(token_ids=prompt, prompt_length=len(prompt), options=options)
            for prompt in PROMPTS
        ]
    )


def texts(runtime: LLMInferenceRuntime, tokens: int = 30) -> Texts:
    answers = runtime.handle_request(request(tokens)).rows
    assert [answer.error for answer in answers] == [None] * len(PROMPTS)
    return {row: answer.token_ids for row, answer in enumerate(answers)}


def runtime_of(folder: Path, method: Literal["off", "eagle"]) -> LLMInferenceRuntime:
    speculation = SpeculationOptions(method=method, adaptive=False)
    options = RuntimeOptions(threads=1, max_batch=4, speculation=speculation, verify=False)
    return LLMInferenceRuntime.open(folder, options)


def poison_embedding(folder: Path) -> None:
    table = map_tensor(folder / EMBEDDING_FILE, "embedding")
    whole = np.memmap(folder / EMBEDDING_FILE, np.uint8, "r+")
    first = len(whole) - table.nbytes
    whole[first:].view(table.dtype).reshape(table.shape)[POISON] = np.nan
    whole.flush()


def assert_finite(caches: HybridCacheManager) -> None:
    for tensor in caches.kv.keys + caches.kv.values:
        assert np.isfinite(tensor.array).all()


@pytest.fixture
def folder(tmp_path: Path, dialect: str) -> Path:
    return export_with_draft("qwen3_untied", tmp_path, dialect=dialect, capacity=96)


class PoisonedProposer(LookupProposer):
    """Trees that go on as the text does; beside it `poisoned` rows have a node of `POISON`."""

    def __init__(self, device: CpuDevice, known: Texts, poisoned: set[int]) -> None:
        options = SpeculationOptions(lookup_tokens=3)
        super().__init__(device.tree_ops, options, fixed_width=False)
        self._known, self._poisoned = known, poisoned

    def ready(self, _rows: Sequence[DecodingRow], _speculating: Sequence[bool]) -> bool:
        return True

    def propose(
        self, rows: Sequence[DecodingRow], speculating: Sequence[bool], trees: TreeBuffers
    ) -> list[int]:
        ids = np.zeros((len(rows), 4), np.int32)
        parents = np.full((len(rows), 4), NO_NODE, np.int32)
        parents[:, 0] = -1
        for place, row in enumerate(rows):
            if speculating[place]:
                given = len(row.token_ids) - row.prompt_length
                right = [*self._known[row.number], 0, 0][given : given + 2]
                ids[place, 1:] = [POISON if row.number in self._poisoned else 12, *right]
                parents[place, 1:] = [0, 0, 2]
        self._ops.upload_tree(trees, ids, parents)
        return [4 if wanted else 1 for wanted in speculating]


@pytest.mark.parametrize("poisoned", [{1}, {0, 2}, {0, 1, 2}])
def test_a_rejected_node_spoils_no_text(folder: Path, poisoned: set[int]) -> None:
    with closing(runtime_of(folder, "off")) as plain:
        known = texts(plain)
    assert POISON not in {token for text in known.values() for token in text}
    poison_embedding(folder)
    options = RuntimeOptions(speculation=SpeculationOptions(method="eagle"), verify=False)
    device = CpuDevice()
    parts = assemble(load_deployment(folder, options), folder, EngineOptions(threads=1), device)
    assert parts.speculation is not None
    proposer = PoisonedProposer(device, known, poisoned)
    trees = parts.speculation._trees
    strategy = SpeculativeStrategy(parts.runner, parts.sampler, trees, proposer, None)
    runtime = LLMInferenceRuntime(parts.runner, device, parts.sampler, strategy)
    with closing(runtime):
        for _ in range(2):
            assert texts(runtime) == known
            runtime._clear("look")
            assert_finite(runtime._runner.get_kv_cache())
    # The other rows go on to speculate.
    assert (strategy.metrics.accept_length > 2.5) == (len(poisoned) < len(PROMPTS))


@pytest.fixture
def drafting(folder: Path) -> Iterator[LLMInferenceRuntime]:
    with closing(runtime_of(folder, "eagle")) as runtime:
        yield runtime


def draft_caches(runtime: LLMInferenceRuntime) -> HybridCacheManager:
    assert runtime._speculation is not None
    proposer = runtime._speculation.proposer
    assert isinstance(proposer, EagleProposer)
    return proposer._draft.caches


def test_a_poisoned_draft_recovers(drafting: LLMInferenceRuntime) -> None:
    known = texts(drafting, 60)
    rounds = drafting.speculation_metrics.rounds
    caches = draft_caches(drafting)
    for tensor in caches.kv.keys + caches.kv.values:
        tensor.array[...] = np.nan
    for _ in range(2):
        assert texts(drafting, 60) == known
    # Row 3 of the cache was in no batch.
    for tensor in caches.kv.keys + caches.kv.values:
        assert np.isfinite(tensor.array[:3]).all()
    before = drafting.speculation_metrics.rounds
    assert texts(drafting, 60) == known
    assert drafting.speculation_metrics.rounds - before == rounds


def test_a_draft_that_only_misses_keeps_its_numbers(
    drafting: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []
    caches = draft_caches(drafting)
    finite = caches.finite

    def look(row: int) -> bool:
        looked.append(finite(row))
        return looked[-1]

    monkeypatch.setattr(caches, "finite", look)
    monkeypatch.setattr(caches, "zero_row", lambda row: pytest.fail(f"row {row} is healthy"))
    texts(drafting, 60)
    assert looked
    assert all(looked)
