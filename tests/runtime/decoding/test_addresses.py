"""Buffers stay where they are, whatever rows come and go."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.drafting.eagle import EagleProposer
from runtime.options import RuntimeOptions, SpeculationOptions
from runtime.request import RequestOptions, RowRequest
from runtime.steps.bindings import StepBindings
from runtime.tensors.tensor_map import TensorMap
from tests.runtime.conftest import EngineFolders


@pytest.fixture
def runtime(engine_and_draft: Path) -> Iterator[LLMInferenceRuntime]:
    options = RuntimeOptions(
        max_batch=3, speculation=SpeculationOptions(method="eagle", adaptive=False)
    )
    with closing(LLMInferenceRuntime.open(engine_and_draft, options)) as opened:
        yield opened


@pytest.fixture
def engine_and_draft(tree_folders: EngineFolders, dialect: str) -> Path:
    return tree_folders("qwen3", dialect)


def bindings(runtime: LLMInferenceRuntime) -> dict[tuple[int, str], int]:
    """The address of every binding of the steps of base and draft that decode."""
    assert runtime._speculation is not None
    proposer = runtime._speculation.proposer
    assert isinstance(proposer, EagleProposer)
    steps: list[StepBindings] = [runtime._runner._steps, proposer._draft._steps]
    maps: list[TensorMap] = [one._tensors for one in steps]
    return {
        (place, name): tensors.get(name).address
        for place, tensors in enumerate(maps)
        for name in tensors
    }


def row(tokens: list[int], max_tokens: int) -> RowRequest:
    options = RequestOptions(max_tokens=max_tokens, ignore_eos=True)
    return RowRequest(token_ids=tokens, prompt_length=len(tokens), options=options)


def test_addresses_outlast_a_join_an_eviction_and_a_growing_bucket(
    runtime: LLMInferenceRuntime,
) -> None:
    before = bindings(runtime)
    long = [7 * n % 280 + 3 for n in range(236)]
    runtime.admit([row(long, 40)])
    for _ in range(4):
        runtime.step()
    runtime.admit([row([5, 6, 7], 4), row([8, 9], 20)])
    assert bindings(runtime) == before
    sizes = set()
    while runtime.active:
        runtime.step()
        sizes.add(runtime._runner.get_kv_cache().kv.bucket)
        assert bindings(runtime) == before
    assert len(sizes) > 1
