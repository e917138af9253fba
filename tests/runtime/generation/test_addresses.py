"""Buffers stay where they are, whatever rows come and go and whatever adapter they share."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.speculation.eagle import EagleProposer
from hearth.runtime.tensors import lora
from tests.peft_models import write_peft
from tests.references import reference_folder
from tests.runtime.export.trees import export_with_draft

Addresses = set[tuple[int, str, int]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the engines of a base that takes adapters and of its draft, exported once."""

    @cache
    def folder(dialect: str) -> Path:
        target = tmp_path_factory.mktemp("addresses")
        return export_with_draft("qwen3", target, max_lora_rank=8, dialect=dialect)

    return folder


@pytest.fixture(params=[False, True], ids=["any rank", "fixed rank"])
def runtime(
    request: pytest.FixtureRequest,
    folders: Callable[..., Path],
    dialect: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[LLMInferenceRuntime]:
    """One whose inputs of adapters have any rank, and one with slots of the greatest."""
    for module in ("hearth.runtime.tensors.lora", "hearth.runtime.lora.lora_manager"):
        monkeypatch.setattr(f"{module}.has_fixed_rank", lambda _: request.param)
    options = RuntimeOptions(
        max_batch=3,
        speculation=SpeculationOptions(method="eagle", adaptive=False),
        prefix_cache_bytes=1 << 20,
    )
    with closing(LLMInferenceRuntime.open(folders(dialect), options)) as opened:
        yield opened


def addresses(runtime: LLMInferenceRuntime) -> Addresses:
    """Of every binding of the steps of base and draft that decode, adapters of any rank aside."""
    assert runtime._speculation is not None
    proposer = runtime._speculation.proposer
    assert isinstance(proposer, EagleProposer)
    return {
        (engine, name, tensors.get(name).address)
        for engine, steps in enumerate((runtime._runner._steps, proposer._draft._steps))
        for (_, first, _), tensors in steps._maps.items()
        for name in tensors
        if first is None
        if lora.has_fixed_rank(runtime.config) or not name.startswith("lora_")
    }


def row(tokens: list[int], max_tokens: int, adapter: str = "") -> RowRequest:
    options = RequestOptions(max_tokens=max_tokens, ignore_eos=True, adapter=adapter)
    return RowRequest(token_ids=tokens, prompt_length=len(tokens), options=options)


def run_out(runtime: LLMInferenceRuntime, before: Addresses) -> set[int]:
    """Step until no row is left; the buckets that the cache had."""
    sizes = set()
    while runtime.active:
        runtime.step()
        sizes.add(runtime._runner.get_kv_cache().kv.bucket)
        assert addresses(runtime) == before
    return sizes


def test_addresses_outlast_a_join_an_eviction_and_a_growing_bucket(
    runtime: LLMInferenceRuntime,
) -> None:
    before = addresses(runtime)
    runtime.admit([row([7 * n % 280 + 3 for n in range(236)], 40)])
    for _ in range(4):
        runtime.step()
    runtime.admit([row([5, 6, 7], 4), row([8, 9], 20)])
    assert addresses(runtime) == before
    assert len(run_out(runtime, before)) > 1


def test_addresses_outlast_a_switch(runtime: LLMInferenceRuntime, tmp_path: Path) -> None:
    before = addresses(runtime)
    base = reference_folder("qwen3")
    for seed, name in enumerate(("first", "second")):
        write_peft(base, tmp_path / name, rank=8, seed=seed)
        runtime.load_adapter(name, tmp_path / name)
    for name in ("first", "", "second", "first", ""):
        runtime.admit([row([5, 6, 7], 5, name), row([8, 9], 5, name)])
        assert runtime.adapter == name
        run_out(runtime, before)
    runtime.unload_adapter("first")
    assert addresses(runtime) == before


def test_addresses_outlast_a_restore(runtime: LLMInferenceRuntime) -> None:
    before = addresses(runtime)
    prompt = [7 * n % 280 + 3 for n in range(100)]
    for tail in ([5, 6], [8, 9], [5, 6]):
        runtime.admit([row(prompt + tail, 5), row([8, 9], 5)])
        run_out(runtime, before)
    # The first is always tried, as nobody knows yet what loading takes.
    assert runtime.prefill_metrics.reused >= 96
