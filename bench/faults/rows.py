"""The table of `bench faults`: what is done to a daemon, and what it has to keep to."""

from collections.abc import Callable
from typing import NamedTuple

from bench.faults import clients, executor, inputs
from bench.faults.trial import Trial


class Row(NamedTuple):
    """One fault or bad input: `limit` says when it counts as survived, `run` tries it."""

    name: str
    what: str
    limit: str
    run: Callable[[Trial], None]


FAULTS = (
    Row(
        "Client killed in mid-stream",
        "kill -9 of a client beside another one",
        "its place is free within its lease (2 s), the other reply is the same token for token",
        clients.client_killed,
    ),
    Row(
        "Client stops reading",
        "a client that asks for a reply and long texts, and reads nothing",
        "its reply ends as slow_client within 30 s, the daemon grows by 100 MB at most, the other "
        "reply is the same",
        clients.client_stops_reading,
    ),
    Row(
        "Client reconnects with the same identity",
        "a second connection with the routing id of one whose reply streams",
        "no answer reaches the second; once the first has left the id can be used again",
        clients.same_identity,
    ),
    Row(
        "GPU actor killed",
        "kill -9 of the executor in decode, in two stages of its start, in prefill, and behind "
        "the last restart",
        "open requests end with executor_failed within 1 s, waiting ones run later, not ready "
        "meanwhile, replaced, at last exit code 69",
        executor.executor_killed,
    ),
    Row(
        "GPU actor hangs",
        "SIGSTOP of the executor, for less than its limit and for good",
        "a pause of 1 s of 3 changes nothing; then executor_failed within the limit and 1 s, and "
        "it is replaced",
        executor.executor_hangs,
    ),
    Row(
        "Same bad request twice",
        "max_tokens 0, twice",
        "the same refusal twice, naming the field; the next request is served",
        inputs.same_bad_request_twice,
    ),
)
INPUTS: tuple[Row, ...] = ()
ROWS = (*FAULTS, *INPUTS)
NOT_RUN = {
    "Image of 1x1 and others": "waits for vision",
}
"""Rows that no daemon is tried with here, and why."""
