"""Adapters and external weights on a GPU: every engine that takes them against the CPU."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.daemon.shipped_files import EXAMPLE_HOME
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.export.export import export_weights
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GeneratedRow, GenerationRequest, RowRequest
from hearth.runtime.text.tokenizer import Tokenizer
from tests.gpu.conftest import CAPACITY, DRAFT, MODEL
from tests.gpu.near_ties import Reference, divergences, greedy_row, references
from tests.peft_models import write_peft
from tests.runtime.weights.external_models import tuned

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PLAN = os.environ.get("HEARTH_TEST_ADAPTER_PLAN")
NEAR_TIE = 0.1
"""Lead, in log probability, that rounding to half precision may turn around."""
RANK = 16
OPTIONS = ExportOptions(backend="onnxruntime", device="cuda", capacity=CAPACITY, max_lora_rank=RANK)
ENGINES = {
    "kernels-fp16": structs.replace(OPTIONS, backend="kernels", dtype="float16"),
    "kernels-eagle-fp16": structs.replace(
        OPTIONS, backend="kernels", dtype="float16", draft=DraftOptions(folder=DRAFT)
    ),
    "fp32": OPTIONS,
    "fp16": structs.replace(OPTIONS, dtype="float16"),
    "eagle-fp16": structs.replace(OPTIONS, dtype="float16", draft=DraftOptions(folder=DRAFT)),
}
CAPTURED = ("kernels-fp16", "kernels-eagle-fp16", "tensorrt")
"""Engines whose decode steps are CUDA graphs."""
ADAPTERS = {"first": 16, "second": 4}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random ones of the shipped model, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate(ADAPTERS.items()):
        write_peft(MODEL, folder / name, rank=rank, alpha=2 * rank, seed=seed)
    return folder


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Iterator[LLMInferenceRuntime]:
    """The same model and adapters on the CPU in float32."""
    engine = tmp_path_factory.mktemp("engines") / "cpu"
    export_model(MODEL, engine, ExportOptions(capacity=CAPACITY, max_lora_rank=RANK))
    runtime = opened(engine, adapters)
    yield runtime
    runtime.close()


@pytest.fixture(scope="module", params=[*ENGINES, "tensorrt"])
def named(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, adapters: Path
) -> Iterator[tuple[str, LLMInferenceRuntime]]:
    """A runtime on the GPU with its decode steps captured, and the name of its engine."""
    if request.param == "tensorrt":
        if not PLAN:
            pytest.skip("HEARTH_TEST_ADAPTER_PLAN names no engine folder")
        engine = Path(PLAN)
    else:
        engine = tmp_path_factory.mktemp("engines") / request.param
        export_model(MODEL, engine, ENGINES[request.param])
    runtime = opened(engine, adapters)
    runtime.capture(range(1, runtime.max_batch + 1))
    assert runtime.counters.failed_captures == 0, runtime.counters.failure
    yield request.param, runtime
    runtime.close()


def opened(engine: Path, adapters: Path) -> LLMInferenceRuntime:
    runtime = LLMInferenceRuntime.open(engine, RuntimeOptions(max_batch=3))
    for name in ADAPTERS:
        runtime.load_adapter(name, adapters / name)
    return runtime


@pytest.fixture(scope="module")
def prompts(cpu_engine: Path) -> list[list[int]]:
    tokenizer = Tokenizer.open(cpu_engine)
    return [
        tokenizer.encode_pairs([("system", EXAMPLE_HOME), ("user", question)])
        for question in ("hello", "turn on the desk lamp", "set the main thermostat to 21 degrees")
    ]


def rows_with(adapter: str, prompts: list[list[int]]) -> list[RowRequest]:
    rows = [greedy_row(prompt, 30, ignore_eos=True) for prompt in prompts]
    return [
        structs.replace(row, options=structs.replace(row.options, adapter=adapter)) for row in rows
    ]


def test_rows_say_what_they_say_on_the_cpu_with_each_adapter(
    named: tuple[str, LLMInferenceRuntime], cpu: LLMInferenceRuntime, prompts: list[list[int]]
) -> None:
    _, runtime = named
    for adapter in ("", *ADAPTERS, "", "second"):
        wanted = references(cpu, rows_with(adapter, prompts))
        given = [row.tokens for row in references(runtime, rows_with(adapter, prompts))]
        parted = divergences(given, wanted)
        print("divergences", adapter, parted)  # noqa: T201 - reported with the figures of the run
        assert [one for one in parted if one.lead >= NEAR_TIE] == []


def test_a_switch_back_gives_the_same_numbers_and_misses_no_graph(
    named: tuple[str, LLMInferenceRuntime], prompts: list[list[int]]
) -> None:
    name, runtime = named
    # Alone a prompt is read in the same chunks each time; speculation goes by the clock.
    alone = prompts[2:] if runtime.speculation_metrics.rounds == 0 else []
    before = {one: _rows(runtime, one, alone or prompts) for one in ("", "first")}
    assert [row.token_ids for row in before[""]] != [row.token_ids for row in before["first"]]
    misses, chunks = runtime.graphs["base"].misses, runtime.prompt_graphs.misses
    for one in ("first", "", "second", "first", ""):
        again = _rows(runtime, one, alone or prompts)
        if alone and one in before:
            assert again == before[one]
    chunks = runtime.prompt_graphs.misses - chunks
    if name in CAPTURED:
        assert runtime.graphs["base"].misses - misses == chunks


def _rows(
    runtime: LLMInferenceRuntime, adapter: str, prompts: list[list[int]]
) -> list[GeneratedRow]:
    return runtime.handle_request(GenerationRequest(rows=rows_with(adapter, prompts))).rows


WEIGHTS_PLAN = os.environ.get("HEARTH_TEST_WEIGHTS_PLAN")
WEIGHTS_ENGINES: dict[str, dict[str, Any]] = {
    "kernels-fp16": {"backend": "kernels", "dtype": "float16"},
    "fp32": {},
    "fp16": {"dtype": "float16"},
    "classic-fp16": {"dialect": "classic", "dtype": "float16"},
}


def spoken(engine: Path, weights: str = "") -> list[Reference]:
    """What an engine says, with its steps captured."""
    with closing(
        LLMInferenceRuntime.open(engine, RuntimeOptions(max_batch=2, weights=weights))
    ) as runtime:
        runtime.capture([1, 2])
        assert runtime.counters.failed_captures == 0, runtime.counters.failure
        rows = [greedy_row([5 + row, 60, 7, 80, 9], 30, ignore_eos=True) for row in range(2)]
        return references(runtime, rows)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The shipped model and another fine-tune of its shape."""
    return MODEL, tuned(MODEL, tmp_path_factory.mktemp("models") / "tuned")


@pytest.fixture(scope="module")
def wanted(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[list[Reference]]:
    """What both say on the CPU in float32."""
    folder = tmp_path_factory.mktemp("cpu")
    found = []
    for model in models:
        export_model(model, folder / model.name, ExportOptions(capacity=CAPACITY))
        found.append(spoken(folder / model.name))
    return found


@pytest.mark.parametrize("name", [*WEIGHTS_ENGINES, "tensorrt"])
def test_one_engine_serves_two_models(
    tmp_path: Path, models: tuple[Path, Path], wanted: list[list[Reference]], name: str
) -> None:
    engine = tmp_path / "engine"
    if name == "tensorrt":
        if not WEIGHTS_PLAN:
            pytest.skip("HEARTH_TEST_WEIGHTS_PLAN names no engine folder")
        engine = Path(WEIGHTS_PLAN)
    else:
        chosen: dict[str, Any] = {"backend": "onnxruntime", **WEIGHTS_ENGINES[name]}
        options = ExportOptions(device="cuda", capacity=CAPACITY, external_weights=True, **chosen)
        export_model(models[0], engine, options)
    other = tmp_path / "other.safetensors"
    export_weights(models[1], engine, other)
    for weights, reference in zip(("", str(other)), wanted, strict=True):
        given = [row.tokens for row in spoken(engine, weights)]
        parted = divergences(given, reference)
        print("divergences", weights, parted)  # noqa: T201 - reported with the figures of the run
        assert [one for one in parted if one.lead >= NEAR_TIE] == []
