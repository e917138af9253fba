"""A stop answers all that is open, also where that is more than lies with ZeroMQ."""

import time

from tests.daemon.door.harness import greet, hear, raw_client, running_door, say, until

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
