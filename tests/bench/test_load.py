from pathlib import Path

import pytest

from hearth.bench.load import split_job
from hearth.bench.load_clients import LoadJob
from tests.bench.running import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("requests", "clients", "processes"), [(10_000, 32, 4), (10, 7, 3), (2, 4, 4)]
)
def test_nothing_is_lost_in_the_split(requests: int, clients: int, processes: int) -> None:
    whole = LoadJob(socket="s", engine="e", clients=clients, requests=requests, max_tokens=64)
    jobs = split_job(whole, processes)
    assert sum(job.requests for job in jobs) == requests
    assert sum(job.clients for job in jobs) == clients
    assert min(job.clients for job in jobs) >= 1
    assert len({job.seed for job in jobs}) == processes
    assert {(job.socket, job.max_tokens) for job in jobs} == {("s", 64)}


def test_nothing_is_wrong_with_the_real_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    sizes = ("--requests", "41", "--clients", "6", "--processes", "2", "--max-tokens", "16")
    code, figures = run("load", *sizes, "--step-ms", "0.2")
    assert code == 0
    assert figures["tokens"] == 41 * 16
    assert {name: figures[name] for name in ("requests", "lost", "doubled", "disordered")} == {
        "requests": 41,
        "lost": 0,
        "doubled": 0,
        "disordered": 0,
    }


def test_a_process_with_nothing_to_send_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    sizes = ("--requests", "1", "--clients", "2", "--processes", "2", "--max-tokens", "4")
    code, figures = run("load", *sizes, "--step-ms", "0.2")
    assert (code, figures["requests"], figures["tokens"]) == (0, 1, 4)
    assert "type" not in figures
