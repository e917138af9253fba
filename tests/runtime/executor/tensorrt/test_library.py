import sys
from types import ModuleType

import pytest

from runtime.errors import HearthError
from runtime.executor.tensorrt.library import (
    MODULES,
    has_old_memory_api,
    load_library,
    make_log,
    open_runtime,
)
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
    with pytest.raises(HearthError, match=r"tensorrt_rtx .*hearthd\[tensorrt\]") as error:
        load_library("tensorrt_rtx")
    assert error.value.code == "engine_incompatible"


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
    ("version", "old"), [("8.6.1", True), ("10.0.1", True), ("10.1.0", False), ("11.4.0.1", False)]
)
def test_the_memory_calls_follow_the_version_of_the_plan(version: str, *, old: bool) -> None:
    assert has_old_memory_api(version) is old
