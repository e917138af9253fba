"""Adapters in a runtime, beside checkpoints into which they were merged."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.export import ExportOptions, export_model
from runtime.options import RuntimeOptions
from runtime.request import GenerationRequest, RequestOptions, RowRequest
from tests.peft_models import merge, write_peft
from tests.references import reference_folder

PROMPT = [3, 14, 15, 92, 6, 5, 35]
OPTIONS = RuntimeOptions(threads=1, max_batch=2, capacity=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of a base and of two checkpoints with an adapter merged, and the adapters."""
    place, base = tmp_path_factory.mktemp("adapters"), reference_folder("qwen3")
    write_peft(base, place / "first", rank=8)
    write_peft(base, place / "second", rank=4, targets=("q", "v"), use_rslora=True, seed=1)
    export_model(base, place / "base", ExportOptions(max_lora_rank=8))
    for name in ("first", "second"):
        merge(base, place / name, place / f"{name}_merged")
        export_model(place / f"{name}_merged", place / f"{name}_engine", ExportOptions())
    return place


@pytest.fixture
def runtime(folder: Path) -> Iterator[LLMInferenceRuntime]:
    opened = LLMInferenceRuntime.open(folder / "base", OPTIONS)
    for name in ("first", "second"):
        opened.load_adapter(name, folder / name)
    yield opened
    opened.close()


def answer(runtime: LLMInferenceRuntime, adapter: str = "") -> tuple[list[int], list[float]]:
    options = RequestOptions(max_tokens=12, ignore_eos=True, adapter=adapter, logprobs=0)
    row = RowRequest(token_ids=list(PROMPT), prompt_length=len(PROMPT), options=options)
    response = runtime.handle_request(GenerationRequest(rows=[row, row])).rows[0]
    assert not response.error
    return response.token_ids, response.logprobs


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_switch_gives_what_the_merged_weights_give(
    folder: Path, runtime: LLMInferenceRuntime, name: str
) -> None:
    merged = LLMInferenceRuntime.open(folder / f"{name}_engine", OPTIONS)
    wanted, logprobs = answer(merged)
    merged.close()
    got, own = answer(runtime, name)
    assert got == wanted != answer(runtime)[0]
    assert np.allclose(own, logprobs, atol=1e-4)
