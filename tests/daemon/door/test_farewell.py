"""A stop answers all that is open, also where that is more than lies with ZeroMQ."""

import time

import msgspec

from tests.daemon.door.harness import greet, hear, raw_client, running_door, say, until
from tests.system.faults.raw_peer import connected_peer, send_message

ASKED = 60


def test_a_stop_answers_more_requests_than_the_socket_takes_at_once() -> None:
    with running_door(requests_per_client=ASKED, send_mark=4) as door, raw_client(door.path) as raw:
        greet(raw)
        for number in range(ASKED):
            say(raw, {"t": "generate", "id": str(number), "prompt": "hang"})
        until(lambda: door.on_loop(lambda: door.door.open_requests) == ASKED)
        ended: dict[str, str] = {}
        door.portal.start_task_soon(door.door.stop)
        while len(ended) < ASKED:
            answer = hear(raw)
            if answer["t"] == "error":
                assert answer["id"] not in ended
                ended[answer["id"]] = answer["code"]
    assert set(ended.values()) == {"shutting_down"}


def test_a_stop_does_not_wait_for_a_client_that_never_reads() -> None:
    with running_door(requests_per_client=ASKED, send_mark=4) as door, raw_client(door.path) as raw:
        greet(raw)
        for number in range(ASKED):
            say(raw, {"t": "generate", "id": str(number), "prompt": "hang"})
        until(lambda: door.on_loop(lambda: door.door.open_requests) == ASKED)
        door.portal.call(door.door.stop)
        started = time.monotonic()
        door.portal.call(door.door.ended.wait)
        assert time.monotonic() - started < 30


def test_a_stop_answers_who_reads_again_behind_what_was_left_unread() -> None:
    with running_door() as door, connected_peer(door.path) as peer:
        encode = msgspec.msgpack.encode
        send_message(peer, encode({"t": "hello", "proto": [1]}))
        send_message(peer, encode({"t": "generate", "id": "open", "prompt": "hang"}))
        for number in range(40):
            tokens = [120] * 60_000
            send_message(peer, encode({"t": "detokenize", "id": str(number), "tokens": tokens}))
        delivery = door.on_loop(lambda: door.door._tracker.delivery)
        until(lambda: door.on_loop(lambda: len(delivery.behind) and door.door.open_requests == 1))
        door.portal.start_task_soon(door.door.stop)
        until(lambda: not door.door.open_requests)
        heard = b""
        while part := peer.recv(1 << 20):
            heard += part
    assert b"shutting_down" in heard
