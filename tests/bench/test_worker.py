import time
from contextlib import closing
from pathlib import Path

import pytest

from bench import contenders, worker_main
from bench.worker import Worker
from bench.worker_messages import Advance, Job
from runtime.errors import HearthError


def test_the_floor_is_stepped_in_a_process_of_its_own(tmp_path: Path) -> None:
    job = Job(contender="floor", threads=2, bytes=1 << 22)
    with closing(Worker(job, tmp_path / "log")) as worker:
        seconds = worker.advance(3)
    assert worker.unavailable == ""
    assert len(seconds) == 3
    assert min(seconds) > 0
    assert len(worker.tokens) == 4


def test_a_peer_that_is_not_installed_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(tmp_path, "llama_cpp", monkeypatch)
    with closing(Worker(Job(contender="llama_cpp"), tmp_path / "log")) as worker:
        assert worker.unavailable == "llama_cpp is not installed: make bench-env"


def test_an_engine_folder_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    job = Job(contender="hearth", path=str(tmp_path / "nothing"), prompt=[1], steps=1)
    with closing(Worker(job, tmp_path / "log")) as worker:
        assert "engine_missing" in worker.unavailable


def test_a_pause_is_not_timed(toy: Path, tmp_path: Path) -> None:
    job = Job(contender="hearth", path=str(toy), prompt=[5, 6], steps=6, capture=True)
    with closing(Worker(job, tmp_path / "log")) as worker:
        started = time.monotonic()
        seconds = worker.advance(3, pause_s=0.2)
        assert time.monotonic() - started > 0.6
        # A machine that stalls may lengthen one of them, not all.
        assert min(seconds) < 0.2
        raw = worker.advance(20, raw=True)
    assert len(raw) == 1
    assert raw[0] > 0


def test_only_an_engine_has_launches_of_its_own() -> None:
    model = contenders.FloorModel(Job(contender="floor", bytes=1 << 20))
    with pytest.raises(HearthError, match="no launches"):
        worker_main._advance(model, Advance(2, raw=True))


def test_an_import_error_of_our_own_is_not_taken_for_a_missing_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Job) -> contenders.ContenderModel:
        raise ImportError(name="daemon.nothing")

    monkeypatch.setattr(worker_main, "load", fail)
    monkeypatch.setattr(worker_main, "Replies", lambda: None)
    monkeypatch.setattr("sys.argv", ["worker_main", '{"contender":"floor"}'])
    with pytest.raises(ImportError):
        worker_main.main()


def hide(folder: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module in the way that behaves as if `library` were absent."""
    (folder / f"{library}.py").write_text(
        f"raise ModuleNotFoundError('hidden', name={library!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
