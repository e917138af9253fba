from typing import Any

import pytest

from runtime.device.cuda import programs as cuda_programs
from runtime.device.cuda.context import CudaContext
from runtime.device.cuda.driver import CudaDriver
from runtime.device.cuda.programs import Programs, WantedKernels
from tests.runtime.device.cuda.fake_driver import FakeDriver


class FakeCompiler:
    def __init__(self, *known: tuple[str, tuple[str, ...]]) -> None:
        self.known = known
        self.compiled: list[tuple[str, tuple[str, ...]]] = []

    def has(self, name: str, _source: str, options: tuple[str, ...]) -> bool:
        return (name, options) in self.known

    def compile(self, name: str, source: str, options: tuple[str, ...]) -> bytes:
        self.compiled.append((name, options))
        return f"{name} {source}".encode()


@pytest.fixture
def api() -> FakeDriver:
    made = FakeDriver()
    made.results["cuModuleLoadData"] = ("module",)
    made.results["cuModuleGetFunction"] = ("function",)
    return made


@pytest.fixture(autouse=True)
def _sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_programs, "kernel_source", lambda *where: " of ".join(where))


def programs(api: FakeDriver, compiler: Any) -> Programs:
    return Programs(CudaContext(CudaDriver(api)), compiler)


def test_a_kernel_is_compiled_once_for_each_set_of_macros(api: FakeDriver) -> None:
    compiler = FakeCompiler()
    made = programs(api, compiler)
    sets: list[dict[str, int | str]] = [{"A": 1, "B": "half"}, {"B": "half", "A": 1}, {"A": 2}]
    for macros in sets:
        assert made.kernel("gemm/gemv", "narrow", macros) == "function"
    assert compiler.compiled == [("gemm/gemv", ("-DA=1", "-DB=half")), ("gemm/gemv", ("-DA=2",))]
    (loaded, _) = [call for call in api.calls if call[0] == "cuModuleLoadData"]
    assert loaded[1] == b"gemm/gemv gemm/gemv of runtime.csrc"
    made.close()
    assert api.names().count("cuModuleUnload") == 2


def test_shared_memory_is_asked_for_once_and_never_made_less(api: FakeDriver) -> None:
    made = programs(api, FakeCompiler())
    for shared_bytes in (0, 70_000, 60_000, 90_000):
        made.kernel("gemm/gemv", "narrow", {}, shared_bytes)
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
        wanted.kernel("gemm/gemv", name, {"A": 1}, 70_000)
    compiler = FakeCompiler()
    made = programs(api, compiler)
    made.load(wanted.requests, threads=2)
    assert len(wanted.requests) == 2
    assert set(compiler.compiled) == {("gemm/gemv", ("-DA=1",))}
    before = len(api.calls)
    made.kernel("gemm/gemv", "other", {"A": 1}, 70_000)
    assert len(api.calls) == before


@pytest.mark.parametrize("known", [0, 1, 3])
def test_how_many_kernels_are_compiled_is_told_where_some_are_missing(
    api: FakeDriver, known: int
) -> None:
    wanted, heard = WantedKernels(), list[tuple[str, float | None]]()
    for number in range(3):
        wanted.kernel("gemm/gemv", "narrow", {"A": number})
    compiler = FakeCompiler(*(("gemm/gemv", (f"-DA={number}",)) for number in range(known)))
    made = programs(api, compiler)
    made.load(wanted.requests, threads=2, told=lambda stage, share: heard.append((stage, share)))
    missing = 3 - known
    shares = [("compiling", done / missing) for done in range(missing + 1)] if missing else []
    assert heard == ([*shares, ("opening", None)] if missing else [])
