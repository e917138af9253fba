"""Several replies to one request: one `accepted`, one count, one end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hearth_client import Client, ExecutorFailed
from tests.daemon.door.harness import Harness, greet, hear, raw_client, running_door, say, until


@pytest.fixture
def door() -> Iterator[Harness]:
    with running_door() as harness:
        yield harness


def test_replies_are_told_apart_and_end_as_one(door: Harness) -> None:
    with raw_client(door.path) as client:
        greet(client)
        asked = {"t": "generate", "id": "a", "prompt": "count", "max_tokens": 5, "n": 3}
        say(client, asked)
        answers: list[dict[str, Any]] = [hear(client)]
        while answers[-1]["t"] != "done":
            answers.append(hear(client))
        assert [one["t"] for one in answers].count("accepted") == 1
        deltas = [one for one in answers if one["t"] == "delta"]
        assert [one["seq"] for one in deltas] == [*range(len(deltas))]
        texts = [
            "".join(one["text"] for one in deltas if one.get("choice", 0) == k) for k in (0, 1, 2)
        ]
        assert texts == ["0 1 2 3 4 ", "0 1 ", "0 1 2 "]
        done = answers[-1]
        assert done["reason"] == "length"
        assert done["usage"]["completion_tokens"] == 10
        assert [one["completion_tokens"] for one in done["choices"]] == [5, 2, 3]
        assert not door.on_loop(lambda: door.door.open_requests)
        # The id is free again.
        say(client, {**asked, "n": 1})
        assert hear(client)["t"] == "accepted"
    (first, *_) = door.actors.prepared
    assert len(first.siblings) == 2


def test_a_cancel_ends_all_replies(door: Harness) -> None:
    with Client(door.path) as client:
        generation = client.generate("hang", n=3)
        client.tokenize("a")
        generation.cancel()
        done = generation.result()
    assert [one.reason for one in done.choices] == ["cancelled"] * 3
    (asked,) = [one for one in door.actors.prepared if one.siblings]
    until(lambda: {asked.rid, *asked.siblings} <= {*door.actors.cancelled})
    until(lambda: {asked.rid, *asked.siblings} <= {*door.actors.control_cancelled})


def test_a_failure_of_one_reply_ends_all(door: Harness) -> None:
    with Client(door.path) as client, pytest.raises(ExecutorFailed):
        client.generate("fail", n=2).text()
    (asked,) = door.actors.prepared
    until(lambda: {asked.rid, *asked.siblings} <= {*door.actors.cancelled})
    assert not door.on_loop(lambda: door.door.open_requests)


def test_the_python_client_has_them_as_choices(door: Harness) -> None:
    with Client(door.path) as client:
        generation = client.generate("count", max_tokens=4, n=2)
        assert generation.text() == "0 1 2 3 "
        assert [one.text for one in generation.choices] == ["0 1 2 3 ", "0 1 "]
        assert [one.tokens for one in generation.choices] == [[0, 1, 2, 3], [0, 1]]


def test_each_reply_counts_as_a_generation(door: Harness) -> None:
    with Client(door.path) as client:
        generation = client.generate("hang", n=4)
        client.tokenize("a")
        assert door.on_loop(lambda: door.door._tracker.sessions.generations) == 4
        generation.cancel()
        generation.result()
        assert door.on_loop(lambda: door.door._tracker.sessions.generations) == 0
