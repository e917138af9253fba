"""What `bench load` and its client processes say to one another: one JSON object per line."""

import msgspec

from bench.stream_check import Tally


class LoadJob(msgspec.Struct, frozen=True, kw_only=True):
    """One process: `clients` connections that send `requests` in all, one at a time each."""

    socket: str
    engine: str
    clients: int
    requests: int
    max_tokens: int
    seed: int


class Progress(msgspec.Struct, frozen=True, tag=True):
    """So many requests have ended."""

    requests: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    """All requests have ended."""

    tally: Tally


LoadReply = Progress | Finished
