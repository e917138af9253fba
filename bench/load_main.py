"""A client process of `bench load`: `python -m bench.load_main JOB`, the job as JSON."""

import sys

import msgspec
import uvloop

from bench.load_clients import LoadClients
from bench.load_messages import Finished, LoadJob, Progress
from bench.replies import Replies

_PROGRESS_EVERY = 250


def main() -> None:
    """Run the job, reporting progress and at last the tally."""
    job = msgspec.json.decode(sys.argv[1], type=LoadJob)
    replies = Replies()

    def report(requests: int) -> None:
        if requests % _PROGRESS_EVERY == 0:
            replies.send(Progress(requests))

    replies.send(Finished(uvloop.run(LoadClients(job, report).run())))


if __name__ == "__main__":
    main()
