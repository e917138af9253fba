from __future__ import annotations

import gc
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from hearth_client import (
    Client,
    ClientClosed,
    ClientShared,
    ConnectionLost,
    ConnectionRefused,
    ConnectionTimeout,
    ExecutorFailed,
    Generation,
    InvalidValue,
    TooManyClients,
    session,
)
from hearth_client.address import absence
from tests.daemon.door.harness import Harness, running_door, until

# A child that talks, one that leaves in the middle, and one with a client that was not connected.
FORKED = """
import os, sys
from hearth_client import Client, ClientShared

def child_ends_with(code):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code

with Client(sys.argv[1]) as client:
    child = os.fork()
    if child == 0:
        try:
            client.tokenize("x")
        except ClientShared:
            sys.exit(7)
    assert child_ends_with(7)
    assert client.status().state == "ready"
later = Client(sys.argv[1])
child = os.fork()
assert later.status().state == "ready"
assert child == 0 or child_ends_with(0)
"""


@pytest.fixture
def door() -> Iterator[Harness]:
    with running_door() as harness:
        yield harness


def test_a_stream_and_what_it_leaves(door: Harness) -> None:
    with Client(door.path) as client:
        generation = client.generate("count", max_tokens=3)
        assert [delta.text for delta in generation] == ["0 ", "1 ", "2 "]
        assert generation.text() == "0 1 2 "
        assert generation.tokens == [0, 1, 2]
        assert generation.accepted is not None
        assert generation.accepted.prompt_tokens == 5
        assert generation.request == generation.accepted.request
        assert [reply.text for reply in generation.choices] == ["0 1 2 "]
        done = generation.result()
        assert (done.reason, done.usage.completion_tokens) == ("length", 3)


def test_several_generations_are_read_in_turns(door: Harness) -> None:
    with Client(door.path) as client:
        first = client.generate("count", max_tokens=20)
        second = client.generate(messages=[{"role": "user", "content": "count"}], max_tokens=20)
        pairs = list(zip(first, second, strict=True))
        assert [a.tokens for a, _ in pairs] == [b.tokens for _, b in pairs]
        third, fourth = client.generate("count", max_tokens=9), client.generate("count x")
        client.cancel(fourth)
        assert fourth.text() is not None
        assert third.text() == "0 1 2 3 4 5 6 7 8 "


def test_a_reader_that_is_always_behind_keeps_its_lease() -> None:
    with running_door(lease_s=1.0) as door, Client(door.path) as client:
        hanging = client.generate("hang")
        first, second = client.generate("count", max_tokens=30), client.generate("count x")
        second.text()  # puts all of the first aside
        for _ in first:
            time.sleep(0.05)
        hanging.cancel()
        assert hanging.text() == ""
        assert "lease_expired" not in door.totals()


def test_leaving_a_with_cancels(door: Harness) -> None:
    with Client(door.path) as client:
        with client.generate("hang") as generation:
            pass
        assert generation.text() == ""
        assert generation.done is not None
        assert generation.done.reason == "cancelled"
        until(lambda: len(door.actors.cancelled) == 1)
        generation.cancel()


class Cycle:
    def __init__(self, generation: Generation) -> None:
        self.parts = (generation, self)


def drop_and_break(client: Client) -> None:
    for _ in client.generate("count"):
        break


def drop_and_close(client: Client) -> None:
    with closing(client.generate("hang")):
        pass


def drop_a_cycle(client: Client) -> None:
    Cycle(client.generate("hang"))
    gc.collect()


def drop_in_another_thread(client: Client) -> None:
    kept = [client.generate("hang")]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "leave", [drop_and_break, drop_and_close, drop_a_cycle, drop_in_another_thread]
)
def test_a_reply_that_nobody_reads_any_more_is_cancelled_at_once(
    door: Harness, leave: Callable[[Client], None]
) -> None:
    with Client(door.path) as client:
        leave(client)
        until(lambda: len(door.actors.cancelled) == 1)
        assert client.tokenize("a") == [97], "the session goes on"


def test_what_is_forgotten_while_the_client_is_used_is_cancelled_by_its_user(
    door: Harness,
) -> None:
    with Client(door.path) as client:
        kept = [client.generate("hang") for _ in range(3)]
        session = client._session
        with session._alone():
            kept.pop()
            thread = threading.Thread(target=kept.clear)
            thread.start()
            thread.join()
            assert len(session._forgotten) == 3
        until(lambda: len(door.actors.cancelled) == 3)


def test_a_generation_that_outlives_its_client_does_no_harm(door: Harness) -> None:
    with Client(door.path) as client:
        generation = client.generate("hang")
    del generation
    assert not client._session._forgotten


def test_what_had_come_of_a_reply_is_on_its_failure(door: Harness) -> None:
    with Client(door.path) as client:
        first, second = client.generate("fail"), client.generate("hang")
        with pytest.raises(ExecutorFailed) as caught:
            first.text()
        assert caught.value.text == "0 "
        client.close()
        with pytest.raises(ClientClosed) as closed:
            second.text()
        assert closed.value.text == ""


def test_conversions_and_status(door: Harness) -> None:
    with Client(door.path) as client:
        assert client.tokenize("Hi") == [72, 105]
        assert client.tokenize(messages=[{"role": "user", "content": "Hi"}]) == [72, 105]
        assert client.detokenize([72, 105]) == "Hi"
        assert client.status().model == "toy"
        assert client.connect().server == "hearth test"


def test_the_server_names_the_field(door: Harness) -> None:
    with Client(door.path) as client:
        with pytest.raises(InvalidValue) as caught:
            client.generate("x", stop=["a", ""]).text()
        assert caught.value.field == "stop[1]"
        assert client.tokenize("a") == [97], "the session goes on"


def test_nobody_answers() -> None:
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        client = Client(Path(folder) / "none.sock", timeout=0.1)
        started = time.monotonic()
        with pytest.raises(ConnectionTimeout, match="is `hearth serve` running"):
            client.connect()
        assert time.monotonic() - started > 0.09
        client.close()


@pytest.mark.parametrize("left_over", [False, True])
def test_a_missing_daemon_is_told_at_once(left_over: bool) -> None:  # noqa: FBT001 - a parameter
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        path = Path(folder) / "none.sock"
        if left_over:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        client = Client(path)
        started = time.monotonic()
        reason = "Connection refused" if left_over else "No such file"
        with pytest.raises(ConnectionRefused, match=f"{reason}.*start one with `hearth serve`"):
            client.connect()
        assert time.monotonic() - started < 4, "the timeout is not waited for"
        client.close()


def test_a_daemon_that_went_away_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_TIMEOUT_S", 0.3)
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        client = Client(Path(folder) / "h.sock")
        with running_door(path=Path(folder) / "h.sock"):
            client.connect()
        with pytest.raises((ConnectionTimeout, ConnectionRefused)):
            client.status()
        with pytest.raises(ConnectionRefused):
            client.status()
        with running_door(path=Path(folder) / "h.sock"):
            assert client.tokenize("a") == [97]
            client.close()


def test_a_busy_daemon_is_not_called_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_TIMEOUT_S", 0.3)
    with tempfile.TemporaryDirectory(prefix="hc") as folder, socket.socket(socket.AF_UNIX) as busy:
        busy.bind(f"{folder}/h.sock")
        busy.listen(0)
        with ExitStack() as others:
            for _ in range(8):
                other = others.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                with suppress(BlockingIOError):
                    other.connect(f"{folder}/h.sock")
            assert absence(f"ipc://{folder}/h.sock") == ""
            with closing(Client(f"{folder}/h.sock")) as client, pytest.raises(ConnectionTimeout):
                client.connect()
    assert absence("tcp://127.0.0.1:7700") == ""


def test_the_client_may_start_first() -> None:
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        path = Path(folder) / "h.sock"
        answers: list[list[int]] = []

        def early() -> None:
            with Client(path, timeout=10) as client:
                answers.append(client.tokenize("a"))

        thread = threading.Thread(target=early)
        thread.start()
        time.sleep(0.1)
        with running_door(path=path):
            thread.join(10)
        assert answers == [[97]]


def test_a_session_that_the_server_forgot_is_opened_anew(door: Harness) -> None:
    with Client(door.path, silence_s=0.3) as client:
        epoch = client.connect().epoch
        generation = client.generate("hang")
        client.tokenize("a")
        sessions = door.door._tracker.sessions
        door.on_loop(lambda: [sessions.drop(session) for session in sessions.all()])
        with pytest.raises(ConnectionLost, match="connection_lost"):
            generation.text()
        assert client.tokenize("a") == [97]
        assert client.connect().epoch == epoch


def test_a_stopped_daemon_is_noticed_at_once_and_its_successor_is_used() -> None:
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        path = Path(folder) / "h.sock"
        client = Client(path, timeout=10)
        with running_door(path=path) as door:
            first = client.connect().epoch
            generation = client.generate("hang")
            client.tokenize("a")
            door.on_loop(door.door._tracker.sessions._by_rid.clear)  # no last words
        with pytest.raises(ConnectionLost, match="closed the connection"):
            generation.text()
        with running_door(path=path):
            assert client.generate("count", max_tokens=2).text() == "0 1 "
            assert client.connect().epoch != first
            client.close()


def test_silence_is_a_loss() -> None:
    with running_door() as door:
        client = Client(door.path, silence_s=0.2)
        generation = client.generate("hang")
        time.sleep(0.01)
        assert client.tokenize("a") == [97]
        release = threading.Event()
        door.portal.start_task_soon(release.wait)  # the daemon's loop hangs
        with pytest.raises(ConnectionTimeout):
            generation.text()
        release.set()
        client.close()


def test_a_quiet_daemon_that_lives_is_waited_for() -> None:
    with running_door(step_s=0.5) as door, Client(door.path, silence_s=0.2) as client:
        assert client.generate("count", max_tokens=2).text() == "0 1 "


def test_a_refusal_at_the_door_is_raised_by_connect() -> None:
    with running_door(clients=1) as door, Client(door.path), pytest.raises(TooManyClients):
        Client(door.path).connect()


def test_a_closed_client_stays_closed(door: Harness) -> None:
    client = Client(door.path)
    generation = client.generate("hang")
    client.close()
    client.close()
    with pytest.raises(ClientClosed):
        generation.text()
    with pytest.raises(ClientClosed):
        client.status()


FORGOTTEN = """
import anyio, gc, sys, warnings
from hearth_client import AsyncClient

async def ask():
    client = AsyncClient(sys.argv[1])
    assert await client.tokenize("a") == [97]

warnings.simplefilter("always")
anyio.run(ask, backend=sys.argv[2])
gc.collect()
"""
# What is registered first comes last.
LEFT_IN_A_THREAD = """
import atexit, asyncio, sys, threading

def ask():
    print(asyncio.run_coroutine_threadsafe(client.tokenize("a"), loop).result(10))

atexit.register(ask)
from hearth_client import AsyncClient

client, loop = AsyncClient(sys.argv[1]), asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
asyncio.run_coroutine_threadsafe(client.connect(), loop).result(10)
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_program_that_forgets_to_close_its_client_ends_and_is_told(
    door: Harness, backend: str
) -> None:
    program = [sys.executable, "-c", FORGOTTEN, str(door.path), backend]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "ResourceWarning: a client was not closed" in ended.stderr


def test_the_end_of_a_program_leaves_a_client_to_the_thread_that_uses_it(door: Harness) -> None:
    program = [sys.executable, "-c", LEFT_IN_A_THREAD, str(door.path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[97]\n", "")


def test_a_second_thread_is_refused_while_the_first_waits(tmp_path: Path) -> None:
    client = Client(tmp_path / "nobody", timeout=0.5)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.connect)
        time.sleep(0.1)
        with pytest.raises(ClientShared):
            client.status()
        with pytest.raises(ConnectionTimeout):
            first.result()


def test_a_forked_process_is_refused_the_session_of_its_parent(door: Harness) -> None:
    program = [sys.executable, "-c", FORKED, str(door.path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 0, ended.stderr
