from typing import Any, NamedTuple

import pytest

from hearth.runtime.device.cuda import programs as cuda_programs
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.programs import Programs, WantedKernels
from tests.runtime.device.cuda.fake_driver import FakeDriver


class Config(NamedTuple):
    a: int


class FakeCompiler:
    def __init__(self, *known: str) -> None:
        self.known = known
        self.compiled: list[str] = []

    def has(self, _name: str, source: str, _options: tuple[str, ...]) -> bool:
        return source in self.known

    def compile(self, name: str, source: str, options: tuple[str, ...]) -> bytes:
        assert not options
        self.compiled.append(source)
        return f"{name} {source}".encode()


def source_of(name: str, config: Config, package: str = "hearth.runtime.csrc") -> str:
    return f"{name} of {package} with {config.a}"


@pytest.fixture
def api() -> FakeDriver:
    made = FakeDriver()
    made.results["cuModuleLoadData"] = ("module",)
    made.results["cuModuleGetFunction"] = ("function",)
    return made


@pytest.fixture(autouse=True)
def _sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_programs, "kernel_source", source_of)


def programs(api: FakeDriver, compiler: Any) -> Programs:
    return Programs(CudaContext(CudaDriver(api)), compiler)


def test_a_kernel_is_compiled_once_for_each_configuration(api: FakeDriver) -> None:
    compiler = FakeCompiler()
    made = programs(api, compiler)
    for config in (Config(1), Config(1), Config(2)):
        assert made.kernel("gemm/gemv", "narrow", config) == "function"
    assert compiler.compiled == [source_of("gemm/gemv", Config(number)) for number in (1, 2)]
    (loaded, _) = [call for call in api.calls if call[0] == "cuModuleLoadData"]
    assert loaded[1] == b"gemm/gemv gemm/gemv of hearth.runtime.csrc with 1"
    made.close()
    assert api.names().count("cuModuleUnload") == 2


def test_shared_memory_is_asked_for_once_and_never_made_less(api: FakeDriver) -> None:
    made = programs(api, FakeCompiler())
    for shared_bytes in (0, 70_000, 60_000, 90_000):
        made.kernel("gemm/gemv", "narrow", Config(0), shared_bytes)
    prefix = "CU_FUNC_ATTRIBUTE_"
    asked = [call[2:] for call in api.calls if call[0] == "cuFuncSetAttribute"]
    assert asked == [
        (f"{prefix}PREFERRED_SHARED_MEMORY_CARVEOUT", 100),
        (f"{prefix}MAX_DYNAMIC_SHARED_SIZE_BYTES", 70_000),
        (f"{prefix}MAX_DYNAMIC_SHARED_SIZE_BYTES", 90_000),
    ]


def test_wanted_kernels_are_loaded_ahead(api: FakeDriver) -> None:
    wanted = WantedKernels()
    for name in ("narrow", "narrow", "other"):
        wanted.kernel("gemm/gemv", name, Config(1), 70_000)
    compiler = FakeCompiler()
    made = programs(api, compiler)
    made.load(wanted.requests, threads=2)
    assert len(wanted.requests) == 2
    assert compiler.compiled == [source_of("gemm/gemv", Config(1))]
    before = len(api.calls)
    made.kernel("gemm/gemv", "other", Config(1), 70_000)
    assert len(api.calls) == before


@pytest.mark.parametrize("known", [0, 1, 3])
def test_how_many_kernels_are_compiled_is_told_where_some_are_missing(
    api: FakeDriver, known: int
) -> None:
    wanted, heard = WantedKernels(), list[tuple[str, float | None]]()
    for number in range(3):
        wanted.kernel("gemm/gemv", "narrow", Config(number))
    compiler = FakeCompiler(*(source_of("gemm/gemv", Config(one)) for one in range(known)))
    made = programs(api, compiler)
    made.load(
        wanted.requests, threads=2, progress=lambda stage, share: heard.append((stage, share))
    )
    missing = 3 - known
    shares = [("compiling", done / missing) for done in range(missing + 1)] if missing else []
    assert heard == ([*shares, ("opening", None)] if missing else [])
