"""One contender in a process of its own, so that thread pools and memory stay apart."""

import time
from contextlib import closing
from pathlib import Path

import msgspec

from hearth.bench.child_process import ChildProcess, ParentProcess
from hearth.bench.contenders.contender import Contender, Job, open_contender
from hearth.runtime.errors import HearthError

LOAD_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 120.0


class Advance(msgspec.Struct, frozen=True):
    """Take this many steps, each timed on its own, `pause_s` of untimed waiting before each.

    `raw` launches the engine's newest step that often instead, with no work around it, and gives
    the time of them all as one; its contender must be Hearth.
    """

    steps: int
    pause_s: float = 0.0
    raw: bool = False


class Timed(msgspec.Struct, frozen=True, tag=True):
    """Tokens and the seconds of each step; at first the answer to the prompt, in no step's time."""

    tokens: list[int]
    seconds: list[float] = []
    precision: str = ""


class Worker:
    """A contender that loads from here on; what its libraries print goes to `log`.

    `tokens` begins with the answer to the prompt and grows with every step.
    """

    def __init__(self, job: Job, log: Path) -> None:
        self.job = job
        self._process = ChildProcess("hearth.bench.contenders.worker", job, log, _environment(job))
        self.precision = ""
        self.tokens: list[int] = []

    def ready(self) -> "Worker":
        """Itself, once it is loaded; raises HearthError where it cannot run, and closes it."""
        try:
            timed: Timed = self._process.receive(Timed, LOAD_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.precision = timed.precision
        self.tokens = timed.tokens
        return self

    def advance(self, steps: int, *, pause_s: float = 0.0, raw: bool = False) -> list[float]:
        """Take `steps` steps and return the seconds of each; see `Advance` for the rest."""
        self._process.send(Advance(steps, pause_s, raw))
        timed: Timed = self._process.receive(Timed, STEP_TIMEOUT_S)
        self.tokens += timed.tokens
        return timed.seconds

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _environment(job: Job) -> dict[str, str]:
    return {
        # The floor's threads are its own; everyone else gets what the bench was asked for.
        "OPENBLAS_NUM_THREADS": "1" if job.contender == "floor" else str(job.threads),
        "OMP_NUM_THREADS": str(job.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def main() -> None:
    """Serve as the child: open the job's contender, then answer each `Advance`."""
    parent = ParentProcess()
    try:
        with closing(open_contender(parent.job(Job))) as model:
            parent.send(Timed([model.prefill()], precision=model.precision))
            while (command := parent.receive(Advance)) is not None:
                parent.send(_advance(model, command))
    except HearthError as error:
        parent.refuse(error)


def _advance(model: Contender, command: Advance) -> Timed:
    if command.raw:
        return Timed([], [model.launch(command.steps)])
    timed = Timed([], [])
    for _ in range(command.steps):
        _spin(command.pause_s)
        started = time.perf_counter()
        timed.tokens.append(model.step())
        timed.seconds.append(time.perf_counter() - started)
    return timed


def _spin(seconds: float) -> None:
    # A sleeping processor would come back slow, and that would be measured.
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    main()
