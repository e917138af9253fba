"""The worker process: `python -m daemon.bench.worker_main JOB` with the job as JSON."""

import os
import sys
import time
from typing import BinaryIO

import msgspec

from daemon.bench.contenders import ContenderModel, RawLaunches, load
from daemon.bench.worker_messages import Advance, Job, Ready, Reply, Timed, Unavailable
from runtime.errors import HearthError

PEER_LIBRARIES = ("torch", "transformers", "llama_cpp")


def main() -> None:
    """Load the job's contender, then answer each `Advance` until standard input ends."""
    replies = _private_stdout()
    job = msgspec.json.decode(sys.argv[1], type=Job)
    try:
        model = load(job)
    except ImportError as error:
        if error.name not in PEER_LIBRARIES:
            raise
        _send(replies, Unavailable(f"{job.contender} is not installed: make bench-env"))
        return
    except HearthError as error:
        _send(replies, Unavailable(str(error)))
        return
    _send(replies, Ready(model.first, model.precision))
    for line in sys.stdin.buffer:
        _send(replies, _advance(model, msgspec.json.decode(line, type=Advance)))


def _advance(model: ContenderModel, command: Advance) -> Timed:
    timed = Timed([], [])
    if command.raw:
        if not isinstance(model, RawLaunches):
            raise HearthError("internal", "this contender has no launches of its own")
        timed.seconds.append(model.launch(command.steps))
        return timed
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


def _private_stdout() -> BinaryIO:
    # Libraries that print must not end up between the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return replies


def _send(replies: BinaryIO, reply: Reply) -> None:
    replies.write(msgspec.json.encode(reply) + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
