import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from msgspec import structs

from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions

MODEL = Path(__file__).parents[2] / "models" / "home"
CAPACITY = 1024
"""Holds the longest prompt here, its reply and a tree of 60 nodes behind it."""
KERNELS = ExportOptions(backend="kernels", device="cuda", dtype="float16", capacity=CAPACITY)
ORT = ExportOptions(backend="onnxruntime", device="cuda", capacity=CAPACITY)
EXPORTS = {
    "kernels-fp16": KERNELS,
    "kernels-bf16": structs.replace(KERNELS, dtype="bfloat16"),
    "ort-fp32": ORT,
    "ort-fp16": structs.replace(ORT, dtype="float16"),
    "ort-classic-fp16": structs.replace(ORT, dtype="float16", dialect="classic"),
}
DRAFT = MODEL.with_name("home-draft")
DRAFTED = {
    "kernels-eagle-fp16": structs.replace(KERNELS, draft=DraftOptions(folder=DRAFT)),
    "ort-eagle-fp16": structs.replace(ORT, dtype="float16", draft=DraftOptions(folder=DRAFT)),
    "ort-eagle-fp32": structs.replace(ORT, draft=DraftOptions(folder=DRAFT)),
}
"""Engines with a draft, which speculate with it."""
CHAINED = {
    "ort-chains-fp16": structs.replace(
        ORT, dtype="float16", draft=DraftOptions(folder=DRAFT, verify="chains")
    ),
}
"""The same for chains alone."""
PLAN_VARIABLE = "HEARTH_TEST_PLAN"
"""Names an engine folder of the shipped model whose plan this machine can run."""
DRAFTED_PLAN_VARIABLE = "HEARTH_TEST_DRAFTED_PLAN"
"""The same, with the plan of its draft."""
_PLANS = {"tensorrt": PLAN_VARIABLE, "tensorrt-eagle": DRAFTED_PLAN_VARIABLE}

EngineFolder = Callable[[str], Path]


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> EngineFolder:
    """Gives the shipped model's engine folder by name, exported once."""

    @cache
    def folder(name: str) -> Path:
        if variable := _PLANS.get(name):
            if not os.environ.get(variable):
                pytest.skip(f"{variable} names no engine folder")
            return Path(os.environ[variable])
        target = tmp_path_factory.mktemp("engines") / name
        export_model(MODEL, target, (EXPORTS | DRAFTED | CHAINED)[name])
        return target

    return folder


@pytest.fixture(scope="session")
def cpu_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model's engine folder for the CPU."""
    target = tmp_path_factory.mktemp("engines") / "cpu"
    export_model(MODEL, target, ExportOptions(capacity=CAPACITY))
    return target


@pytest.fixture(scope="session")
def cpu_runtime(cpu_engine: Path) -> Iterator[LLMInferenceRuntime]:
    """The reference: the shipped model on the CPU in float32."""
    runtime = LLMInferenceRuntime.open(cpu_engine, RuntimeOptions())
    yield runtime
    runtime.close()


@pytest.fixture(
    scope="module", params=[*EXPORTS, "kernels-eagle-fp16", "ort-eagle-fp16", *CHAINED, *_PLANS]
)
def gpu_engine(request: pytest.FixtureRequest, engine_folder: EngineFolder) -> Path:
    """Each engine that runs on the GPU here."""
    return engine_folder(request.param)


@pytest.fixture(scope="module")
def gpu_runtime(gpu_engine: Path) -> Iterator[LLMInferenceRuntime]:
    """A runtime on the GPU with its decode steps captured."""
    runtime = LLMInferenceRuntime.open(gpu_engine, RuntimeOptions())
    runtime.capture(range(1, runtime.max_batch + 1))
    assert runtime.counters.failed_captures == 0, runtime.counters.failure
    yield runtime
    runtime.close()
