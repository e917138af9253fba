from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hearth.bench.random_model import QUICK_SHAPE, write_random_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions


@pytest.fixture(scope="session")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "quick"
    write_random_model(folder, QUICK_SHAPE)
    return folder


@pytest.fixture
def runtime(tiny_engine: Path) -> Iterator[LLMInferenceRuntime]:
    """A runtime that speculates by lookup whenever it can."""
    speculation = SpeculationOptions(method="lookup", adaptive=False)
    options = RuntimeOptions(speculation=speculation)
    with closing(LLMInferenceRuntime.open(tiny_engine, options)) as opened:
        yield opened


@pytest.fixture
def runtimes(
    tiny_engine: Path, runtime: LLMInferenceRuntime
) -> Iterator[list[LLMInferenceRuntime]]:
    """One that does not speculate, and the one that does."""
    with closing(LLMInferenceRuntime.open(tiny_engine, RuntimeOptions())) as vanilla:
        yield [vanilla, runtime]
