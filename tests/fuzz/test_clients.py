"""The clients' door, from frames to the answers that leave, and its wire protocol in bytes."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.daemon.door.zmtp import Event, Limits, Message, Refusal, Zmtp
from tests.daemon.door.test_zmtp import PING, READY, command, frame, greeting
from tests.fuzz.clients import CLIENTS, DELIMITED, Clients
from tests.fuzz.doors import DOORS, all_mutations

GIVEN = {
    "proto": [[1], [2, 1], [2]],
    "id": ["a", "b", "c"],
    "traceparent": [f"00-{'1' * 32}-{'2' * 16}-01", "00"],
    "stop": [[], ["\n"]],
    "seed": [None, 1],
    "adapter": ["", "", "", "", "", "a"],
    "content": [
        "hi",
        [{"type": "image", "encoding": "mono8", "frame": 1, "width": 1, "height": 1}],
    ],
}
STRANGER = 100
ENCODE = msgspec.msgpack.encode


@pytest.fixture
def clients(short_folder: Path) -> Iterator[Clients]:
    made = Clients(short_folder, 1)
    yield made
    made.works()
    made.door.close()
    assert made.held == 0
    made.arena.close()


def framed(data: bytes, random: Random) -> tuple[int, list[bytes]]:
    """A message as one of the clients sends it: mostly one frame, behind a delimiter or not."""
    connection = random.choice((*CLIENTS, *CLIENTS, STRANGER))
    if random.random() < 0.01:
        connection = random.randrange(STRANGER, 1 << 30, 2)
    delimited = (connection == DELIMITED) != (random.random() < 0.02)
    chance = random.random()
    if chance < 0.01:
        return connection, [b""] * random.randrange(1, 5)
    if chance < 0.02:
        data += b"\0" * 5000
    more = [random.choice((data, b"1"))] * random.choice((1, 2, 30)) if chance > 0.8 else []
    return connection, [*([b""] if delimited else []), data, *more]


def test_every_message_of_clients_is_answered_or_refused_by_name(clients: Clients) -> None:
    sent, random = 0, Random(2)
    for data in all_mutations("ClientMessage", ENCODE, GIVEN):
        clients.send(*framed(data, random))
        sent += 1
        if sent % 20 == 0:
            clients.greet()
            clients.answer_some()
    assert clients.door.state.totals["refused"] < sent
    # Few mutations are whole messages with a picture: this one is.
    clients.greet()
    image = {"type": "image", "encoding": "mono8", "frame": 1, "width": 1, "height": 1}
    turns = [{"role": "user", "content": [image]}]
    clients.say(CLIENTS[0], {"t": "generate", "id": "seen", "messages": turns}, b"1")
    assert clients.held_once


def test_every_message_of_actors_to_the_door_is_answered_once_at_most(clients: Clients) -> None:
    rids = [0]
    known = {"rid": rids, "code": ["queue_full", "executor_failed"], "slot_times": [{1: 1.0}]}
    for told, data in enumerate(all_mutations("DoorMessage", ENCODE, known)):
        if told % 10 == 0:
            clients.greet()
        clients.ask()
        clients.tell(data)
        rids[:] = clients.open or [0]


LEAVES = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
NODES = LEAVES | st.text(max_size=8) | st.binary(max_size=8) | st.sampled_from(("t", "id", "hello"))
TREES = st.recursive(
    NODES, lambda part: st.lists(part) | st.dictionaries(st.text(), part), max_leaves=5
)


def test_whatever_bytes_come_have_an_answer(clients: Clients) -> None:
    clients.greet()
    tags = st.sampled_from([kind.__struct_config__.tag for kind in DOORS["ClientMessage"]])
    fields = st.sampled_from(
        [name for one in DOORS["ClientMessage"] for name in one.__struct_fields__]
    )
    nearly = st.builds(dict, st.dictionaries(fields, TREES), t=tags).map(ENCODE)

    @settings(max_examples=200, deadline=None, database=None)
    @given(st.binary(max_size=64) | TREES.map(ENCODE) | nearly, st.sampled_from(CLIENTS))
    def say(data: bytes, connection: int) -> None:
        clients.send(connection, [data])
        clients.greet()
        clients.answer_some()

    say()


LIMITS = Limits(frame_bytes=20_000, message_bytes=30_000, frames=4)
STREAMS = 20_000
MOST_HELD = LIMITS.message_bytes + (1 << 16)
GOOD = (
    READY,
    PING,
    command(b"SUBSCRIBE", b"x"),
    frame(b""),
    frame(b"", more=True),
    frame(b"a" * 20),
    frame(b"b" * 300, more=True),
    frame(b"c" * 12_000),
    frame(b"d" * 25_000),
)


def stream(random: Random) -> bytes:
    data = bytearray(greeting(minor=random.randrange(2)))
    data += READY * (random.random() < 0.9)
    data += b"".join(random.choices(GOOD, k=random.randrange(8)))
    for _ in range(random.choice((0, 1, 1, 2, 8))):
        # Most of it near the heads, which are at the beginning.
        place = random.randrange(random.choice((len(data), min(len(data), 150))))
        data[place] = random.choice((0, 1, 2, 4, 6, 0xFF, random.randrange(256)))
    if random.random() < 0.2:
        del data[random.randrange(len(data)) :]
    return bytes(data)


def events(data: bytes, random: Random, most: int) -> list[Event]:
    zmtp, found, at = Zmtp(LIMITS), list[Event](), 0
    while at < len(data):
        room = zmtp.room()
        size = 1 + random.randrange(most)
        part = data[at : at + (size if room is None else min(size, len(room)))]
        at += len(part)
        if room is None:
            zmtp.receive_data(part)
        else:
            room[: len(part)] = part
            zmtp.filled(len(part))
        while (event := zmtp.next_event()) is not None:
            found.append(event)
        assert zmtp.held <= MOST_HELD
    return found


def test_mutated_streams_end_in_messages_or_one_refusal_however_they_are_split() -> None:
    random, messages, refused = Random(1), 0, 0
    for _ in range(STREAMS):
        data = stream(random)
        found = events(data, random, 1 << 16)
        assert (
            events(data, random, random.choice((3, 70, 5000)) if len(data) < 5000 else 5000)
            == found
        )
        refusals = [place for place, one in enumerate(found) if isinstance(one, Refusal)]
        assert refusals in ([], [len(found) - 1])
        for one in found:
            if isinstance(one, Message):
                messages += 1
                assert len(one.frames) == min(one.total, LIMITS.frames)
                assert sum(map(len, one.frames)) <= LIMITS.message_bytes
        refused += len(refusals)
    assert min(messages, refused) > STREAMS / 10
