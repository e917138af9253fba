import time
from contextlib import closing
from pathlib import Path

import pytest

from hearth.bench.contenders import worker
from hearth.bench.contenders.contender import Contender, Job
from hearth.bench.contenders.worker import Worker, missing
from hearth.runtime.errors import HearthError
from tests.bench.running import hide


def test_the_floor_is_stepped_in_a_process_of_its_own(tmp_path: Path) -> None:
    job = Job(contender="floor", threads=2, bytes=1 << 22)
    with closing(Worker(job, tmp_path / "log").ready()) as floor:
        seconds = floor.advance(3)
    assert len(seconds) == 3
    assert min(seconds) > 0
    assert len(floor.tokens) == 4


def test_a_peer_that_is_not_installed_says_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(tmp_path, "llama_cpp", monkeypatch)
    with pytest.raises(HearthError, match="or pip install llama-cpp-python") as caught:
        Worker(Job(contender="llama_cpp"), tmp_path / "log").ready()
    assert caught.value.code == "unsupported_option"


def test_one_line_names_all_packages_that_are_missing() -> None:
    assert missing(["torch", "llama_cpp", "gguf"]) == (
        "torch, llama-cpp-python, gguf are not installed: make bench-env, or pip install "
        "torch llama-cpp-python gguf"
    )


def test_an_engine_folder_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    job = Job(contender="hearth", path=str(tmp_path / "nothing"), prompt=[1], steps=1)
    with pytest.raises(HearthError) as caught:
        Worker(job, tmp_path / "log").ready()
    assert caught.value.code == "engine_missing"


def test_a_pause_is_not_timed(toy: Path, tmp_path: Path) -> None:
    job = Job(contender="hearth", path=str(toy), prompt=[5, 6], steps=6, capture=True)
    with closing(Worker(job, tmp_path / "log").ready()) as hearth:
        started = time.monotonic()
        seconds = hearth.advance(3, pause_s=0.2)
        assert time.monotonic() - started > 0.6
        # A machine that stalls may lengthen one of them, not all.
        assert min(seconds) < 0.2
        raw = hearth.advance(20, raw=True)
    assert len(raw) == 1
    assert raw[0] > 0


def test_an_import_error_of_our_own_is_not_taken_for_a_missing_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Job) -> Contender:
        raise ImportError(name="daemon.nothing")

    monkeypatch.setattr(worker, "open_contender", fail)
    with pytest.raises(ImportError):
        worker._opened(Job(contender="floor"))
