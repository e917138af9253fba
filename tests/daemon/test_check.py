import shutil
from pathlib import Path

import pytest

from daemon import check
from daemon.check import inspect_engine
from daemon.configuration.settings import Settings
from runtime.errors import HearthError


def test_the_report_says_what_would_be_used(tiny_engine: Path) -> None:
    report = inspect_engine(Settings(threads=1, max_batch=2), tiny_engine)
    assert report.ok
    assert report.reason is None
    assert (report.device, report.engine_kind, report.dtype) == ("cpu", "onnxruntime", "float32")
    assert (report.max_batch, report.capacity, report.threads) == (2, 96, 1)
    assert report.memory_needed == sum(report.memory.values()) > 0
    assert report.memory_available > report.memory_needed


def test_what_does_not_fit_is_not_ok(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.budget.available_memory", lambda: 1)
    report = inspect_engine(Settings(), tiny_engine)
    assert not report.ok
    assert "lower max_batch or capacity" in (report.reason or "")


def test_an_onnx_runtime_that_is_too_old_is_not_ok(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_old(_dialect: str, _version: str) -> None:
        raise HearthError("engine_incompatible", "a native engine needs a newer one", "dialect")

    monkeypatch.setattr(check, "check_version", too_old)
    assert inspect_engine(Settings(), tiny_engine).reason == "a native engine needs a newer one"


def test_a_damaged_file_is_refused_by_name(tiny_engine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(tiny_engine, folder)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"e", b"f", 1))
    with pytest.raises(HearthError) as caught:
        inspect_engine(Settings(), folder)
    assert caught.value.field == "tokenizer.json"
    assert inspect_engine(Settings(verify=False), folder).ok


def test_more_than_the_engine_was_built_for_is_refused(tiny_engine: Path) -> None:
    with pytest.raises(HearthError) as caught:
        inspect_engine(Settings(max_batch=5), tiny_engine)
    assert caught.value.field == "max_batch"


def test_no_engine_at_all(tmp_path: Path) -> None:
    with pytest.raises(HearthError) as caught:
        inspect_engine(Settings(), tmp_path / "none")
    assert caught.value.code == "engine_missing"
