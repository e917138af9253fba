import numpy as np

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.generation.assembly import share_context_memory
from tests.runtime.executor.fake_engine import FakeEngine, fake_registry


def _executor(wants: int) -> tuple[EngineExecutor, FakeEngine]:
    engine = FakeEngine()
    engine.required_context_memory = wants
    return EngineExecutor(engine, fake_registry(), ()), engine


def test_the_engine_that_wants_most_says_how_much_they_share() -> None:
    executors, engines = zip(*(_executor(wants) for wants in (640, 0, 64)), strict=True)
    share_context_memory(executors, CpuDevice())
    memory = engines[0].memory
    assert memory is not None
    assert (memory.shape, memory.dtype) == ((640,), np.dtype(np.uint8))
    assert all(engine.memory is memory for engine in engines)


def test_engines_that_want_none_get_none() -> None:
    executor, engine = _executor(0)
    share_context_memory([executor], CpuDevice())
    assert engine.memory is None
