from pathlib import Path
from typing import Any

import pytest

from hearth.bench.contenders.contender import Job
from hearth.bench.decode import contest
from hearth.bench.decode.contest import PROMPT_TOKENS, Contest, prompt_ids
from hearth.runtime.errors import HearthError


class FakeWorker:
    """Cannot run without a path; `closed` has the paths of those that ended."""

    closed: list[str] = []  # noqa: RUF012 - emptied by each test

    def __init__(self, job: Job, log: Path) -> None:
        self.job, self.log = job, log

    def ready(self) -> "FakeWorker":
        if not self.job.path:
            raise HearthError("unsupported_option", "nothing to run", "case")
        return self

    def close(self) -> None:
        self.closed.append(self.job.path)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(FakeWorker, "closed", [])
    monkeypatch.setattr(contest, "Worker", FakeWorker)
    return []


def test_who_cannot_run_is_left_out_with_the_reason(said: list[str]) -> None:
    case = Contest("0.6b/b1", Path("logs"), said.append)
    hearth = Job(contender="hearth", path="x")
    case.invite({"a peer": Job(contender="floor"), "hearth": hearth})
    assert list(case.workers) == ["hearth"]
    assert case.notes == ["a peer is left out: nothing to run"]
    assert said == [
        "0.6b/b1: loading a peer, hearth",
        "0.6b/b1: a peer is left out: nothing to run",
    ]
    worker: Any = case.workers["hearth"]
    assert worker.log == Path("logs/0.6b-b1-hearth.log")
    case.close()
    assert FakeWorker.closed == ["x"]


def test_who_must_run_ends_the_contest_when_it_cannot(said: list[str]) -> None:
    with pytest.raises(HearthError, match="nothing to run"):
        Contest("a", Path(), said.append).enter("hearth", Job(contender="hearth"))


def test_rounds_are_told(said: list[str]) -> None:
    assert sum(1 for _ in Contest("a", Path(), said.append).rounds(2)) == 2
    assert said == ["a: round 1 of 2", "a: round 2 of 2"]


def test_the_prompt_is_the_same_every_time_and_in_every_vocabulary() -> None:
    assert prompt_ids() == prompt_ids()
    assert len(prompt_ids()) == PROMPT_TOKENS
    assert prompt_ids(14) == prompt_ids()[:14]
    assert 3 <= min(prompt_ids()) <= max(prompt_ids()) < 256
