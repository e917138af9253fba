"""Adapters on a GPU: every engine that takes them against the CPU, and switches between steps.

`HEARTH_TEST_ADAPTER_PLAN` names an engine folder of the shipped model, with a plan that takes
adapters of rank 16.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from hearth.daemon.shipped_files import EXAMPLE_HOME
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GeneratedRow, GenerationRequest, RowRequest
from hearth.runtime.text import Tokenizer
from tests.gpu.conftest import CAPACITY, DRAFT, MODEL
from tests.gpu.near_ties import divergences, greedy_row, references
from tests.peft_models import write_peft

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
        tokenizer.encode_chat([("system", EXAMPLE_HOME), ("user", question)])
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
