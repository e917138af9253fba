"""The worker process: `python -m bench.worker_main JOB` with the job as JSON."""

import sys
import time

import msgspec

from bench.contenders import ContenderModel, RawLaunches, load
from bench.replies import Replies
from bench.worker_messages import Advance, Job, Ready, Timed, Unavailable
from runtime.errors import HearthError

PEER_LIBRARIES = ("torch", "transformers", "llama_cpp")


def main() -> None:
    """Load the job's contender, then answer each `Advance` until standard input ends."""
    replies = Replies()
    job = msgspec.json.decode(sys.argv[1], type=Job)
    try:
        model = load(job)
    except ImportError as error:
        if error.name not in PEER_LIBRARIES:
            raise
        replies.send(Unavailable(f"{job.contender} is not installed: make bench-env"))
        return
    except HearthError as error:
        replies.send(Unavailable(str(error)))
        return
    replies.send(Ready(model.first, model.precision))
    for line in sys.stdin.buffer:
        replies.send(_advance(model, msgspec.json.decode(line, type=Advance)))


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


if __name__ == "__main__":
    main()
