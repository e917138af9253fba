"""The local socket's wire protocol: mutated streams of bytes, in any parts."""

from random import Random

from hearth.daemon.door.zmtp import Event, Limits, Message, Refusal, Zmtp
from tests.daemon.door.test_zmtp import PING, READY, command, frame, greeting

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
