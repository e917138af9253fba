import sys
from types import ModuleType
from typing import Literal

import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.executor.tensorrt.library import (
    MODULES,
    has_old_memory_api,
    load_library,
    make_log,
    open_runtime,
)
from tests.runtime.engine_configs import PLAN
from tests.runtime.executor.tensorrt.fake_library import ILogger, NewEngine, fake_library


def _only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for candidates in MODULES.values():
        for name in candidates:
            monkeypatch.setitem(sys.modules, name, ModuleType(name) if name in names else None)


def test_the_whole_library_is_taken_before_the_lean_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "tensorrt", "tensorrt_lean")
    assert load_library("tensorrt").__name__ == "tensorrt"


def test_the_lean_runtime_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "tensorrt_lean_bindings", "tensorrt_rtx")
    assert load_library("tensorrt").__name__ == "tensorrt_lean_bindings"


def test_the_wheel_of_the_bindings_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "tensorrt_rtx_bindings")
    assert load_library("tensorrt_rtx").__name__ == "tensorrt_rtx_bindings"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "tensorrt")
    with pytest.raises(HearthError, match=r"tensorrt_rtx .*pip install 'tensorrt-rtx") as error:
        load_library("tensorrt_rtx")
    assert error.value.code == "engine_incompatible"
    _only(monkeypatch, "tensorrt_rtx")
    with pytest.raises(HearthError, match=r"pip install 'tensorrt-lean-cu13-bindings==10\.16"):
        load_library("tensorrt")


def test_a_log_keeps_the_newest_errors_until_they_are_taken() -> None:
    log = make_log(fake_library(NewEngine(), "10.0.0"))
    for number in range(9):
        log.log(ILogger.ERROR, str(number))
        log.log(ILogger.WARNING, "w")
    assert log.take() == "5; 6; 7; 8"
    assert log.take() == "no reason was given"


def test_host_code_is_not_asked_of_a_runtime_without_it() -> None:
    library = fake_library(NewEngine(), "8.5.0")
    del library.Runtime.engine_host_code_allowed
    runtime = open_runtime(library, None)
    assert not hasattr(runtime, "engine_host_code_allowed")


@pytest.mark.parametrize(
    ("builder", "version", "old"),
    [
        ("tensorrt", "8.6.1", True),
        ("tensorrt", "10.0.1", True),
        ("tensorrt", "10.1.0", False),
        ("tensorrt", "11.4.0.1", False),
        # Its numbers began anew, with the calls of TensorRT 10.
        ("tensorrt_rtx", "1.0.0.21", False),
        ("tensorrt_rtx", "1.7.1.116", False),
    ],
)
def test_the_memory_calls_follow_builder_and_version_of_the_plan(
    builder: Literal["tensorrt", "tensorrt_rtx"], version: str, *, old: bool
) -> None:
    plan = structs.replace(PLAN, builder=builder, tensorrt_version=version)
    assert has_old_memory_api(plan) is old


def test_a_library_that_does_not_start_has_a_reason() -> None:
    library = fake_library(NewEngine(), "10.16.1")
    log = make_log(library)

    def start(_log: object) -> None:
        log.log(ILogger.ERROR, "CUDA driver version is insufficient")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    library.Runtime, library.__name__ = start, "tensorrt"
    with pytest.raises(HearthError, match=r"tensorrt 10\.16\.1 .*driver version is") as caught:
        open_runtime(library, log)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "backend")
