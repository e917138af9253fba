"""One contender in a process of its own, so that thread pools and memory stay apart."""

from pathlib import Path

import msgspec

from bench.json_process import JsonProcess
from bench.worker_messages import Advance, Job, Ready, Reply, Timed, Unavailable
from runtime.errors import HearthError

LOAD_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 120.0


class Worker:
    """A contender, loaded when the constructor returns; what its libraries print goes to `log`.

    `unavailable` says why it cannot run here, and is empty when it can. `tokens` begins with the
    answer to the prompt and grows with every step.
    """

    def __init__(self, job: Job, log: Path) -> None:
        self.job = job
        self.contender = job.contender
        self._process = JsonProcess(
            "bench.worker_main", [msgspec.json.encode(job).decode()], log, _environment(job)
        )
        try:
            reply = self._receive(LOAD_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.precision = reply.precision if isinstance(reply, Ready) else ""
        self.tokens = [reply.token] if isinstance(reply, Ready) else []
        self.unavailable = reply.reason if isinstance(reply, Unavailable) else ""

    def advance(self, steps: int, *, pause_s: float = 0.0, raw: bool = False) -> list[float]:
        """Take `steps` steps and return the seconds of each; see `Advance` for the rest."""
        self._process.send(Advance(steps, pause_s, raw))
        reply = self._receive(STEP_TIMEOUT_S)
        if not isinstance(reply, Timed):
            raise HearthError("internal", f"{self.contender} answered out of turn")
        self.tokens += reply.tokens
        return reply.seconds

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _receive(self, timeout_s: float) -> Reply:
        reply: Reply = msgspec.json.decode(self._process.receive(timeout_s), type=Reply)
        return reply


def _environment(job: Job) -> dict[str, str]:
    return {
        # The floor's threads are its own; everyone else gets what the bench was asked for.
        "OPENBLAS_NUM_THREADS": "1" if job.contender == "floor" else str(job.threads),
        "OMP_NUM_THREADS": str(job.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
