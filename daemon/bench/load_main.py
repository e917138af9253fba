"""A client process of `bench load`: `python -m daemon.bench.load_main JOB`, the job as JSON."""

import sys

import msgspec
import uvloop

from daemon.bench.load_clients import LoadClients
from daemon.bench.load_messages import Finished, LoadJob, LoadReply, Progress

_PROGRESS_EVERY = 250


def main() -> None:
    """Run the job, reporting progress and at last the tally."""
    job = msgspec.json.decode(sys.argv[1], type=LoadJob)
    tally = uvloop.run(LoadClients(job, _report).run())
    _send(Finished(tally))


def _report(requests: int) -> None:
    if requests % _PROGRESS_EVERY == 0:
        _send(Progress(requests))


def _send(reply: LoadReply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
