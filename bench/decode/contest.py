"""Contenders of one case that take turns, each in a process of its own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from hearth.bench.contenders.contender import Job
from hearth.bench.contenders.worker import Worker
from hearth.runtime.errors import HearthError

PROMPT_TOKENS = 32
Note = Callable[[str], None]


def prompt_ids(count: int = PROMPT_TOKENS) -> list[int]:
    """The prompt of every contender: ids that each model of the bench has."""
    ids = np.random.default_rng(0).integers(3, 256, count)
    return [int(token) for token in ids]


class Contest:
    """The contenders that can run here, by name; `notes` say why others are left out.

    What their libraries print goes to files in `logs`, what goes on to `note`.
    """

    def __init__(self, case: str, logs: Path, note: Note) -> None:
        self.workers: dict[str, Worker] = {}
        self.notes: list[str] = []
        self._case = case
        self._logs = logs
        self._note = note

    def enter(self, name: str, job: Job) -> None:
        """Load a contender; raises HearthError where it cannot run."""
        self.say(f"loading {name}")
        self.workers[name] = Worker(job, self.log(name)).ready()

    def invite(self, jobs: Mapping[str, Job]) -> None:
        """Load contenders, all at once, or note why one cannot run."""
        self.say(f"loading {', '.join(jobs)}")
        loading = {name: Worker(job, self.log(name)) for name, job in jobs.items()}
        with ExitStack() as undo:
            for worker in loading.values():
                undo.callback(worker.close)
            for name, worker in loading.items():
                self._welcome(name, worker)
            undo.pop_all()

    def _welcome(self, name: str, worker: Worker) -> None:
        try:
            self.workers[name] = worker.ready()
        except HearthError as error:
            self.remark(f"{name} is left out: {error.message}")

    def say(self, text: str) -> None:
        """Tell what goes on."""
        self._note(f"{self._case}: {text}")

    def remark(self, text: str) -> None:
        """Say it now, and beside the figures."""
        self.notes.append(text)
        self.say(text)

    def rounds(self, count: int) -> Iterator[None]:
        """One turn of everybody after the other."""
        for turn in range(count):
            self.say(f"round {turn + 1} of {count}")
            yield

    def log(self, name: str) -> Path:
        """The file of a contender."""
        return self._logs / f"{self._case.replace('/', '-')}-{name.replace(' ', '-')}.log"

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.close()
