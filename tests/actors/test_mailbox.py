from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
import zmq

from hearth.actors import mailbox as mailbox_module
from hearth.actors.addresses import SocketFolder, private_folder, remove_abandoned, remove_sockets
from hearth.actors.mailbox import (
    MailboxFull,
    Receiver,
    Sender,
    ZmqContext,
    check_endpoint,
    wait_any,
)
from hearth.actors.messages import (
    AskReport,
    Cancel,
    Request,
    SchedulerMessage,
    StepOutput,
    TokenizerMessage,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.request import RequestOptions
from tests.actors.mailboxes import next_mail


@pytest.fixture(params=[{}, {"use_uvloop": True}], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", request.param


@pytest.fixture
def context() -> Iterator[ZmqContext]:
    with zmq.Context() as made:
        yield made


@pytest.fixture(params=["inproc", "ipc"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="mb") as folder:
        yield f"{request.param}://{folder}/a"


def pair(
    context: ZmqContext, endpoint: str, limit: int = 100
) -> tuple[Receiver[SchedulerMessage], Sender[SchedulerMessage]]:
    receiver: Receiver[SchedulerMessage] = Receiver(context, [endpoint], SchedulerMessage, limit)
    sender: Sender[SchedulerMessage] = Sender(context, endpoint, limit)
    return receiver, sender


def close(*mailboxes: Receiver[Any] | Sender[Any]) -> None:
    for mailbox in mailboxes:
        mailbox.close()


async def test_messages_arrive_in_order_and_are_counted(context: ZmqContext, endpoint: str) -> None:
    receiver, sender = pair(context, endpoint)
    sent: list[SchedulerMessage] = [
        Cancel(rid=1),
        Request(2, RequestOptions(top_k=3), token_ids=[5, 6]),
        AskReport(3),
    ]
    for message in sent:
        sender.post(message)
    with anyio.fail_after(5):
        assert [await receiver.receive() for _ in sent] == sent
    assert receiver.receive_nowait() is None
    close(receiver, sender)


async def test_a_waiting_receiver_is_woken_for_every_message(
    context: ZmqContext, endpoint: str
) -> None:
    receiver, sender = pair(context, endpoint, limit=500)
    got: list[int] = []

    async def read() -> None:
        while len(got) < 200:
            message = await receiver.receive()
            assert isinstance(message, Cancel)
            got.append(message.rid)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            for rid in range(200):
                sender.post(Cancel(rid))
                if rid % 3 == 0:
                    await anyio.lowlevel.checkpoint()
    assert got == list(range(200))
    close(receiver, sender)


async def test_cancelled_receives_lose_nothing(context: ZmqContext, endpoint: str) -> None:
    receiver, sender = pair(context, endpoint, limit=1000)
    timing = random.Random(1)
    got: list[int] = []

    def produce() -> None:
        for rid in range(300):
            sender.send_blocking(Cancel(rid), 5)
            time.sleep(timing.random() * 0.0005)

    thread = threading.Thread(target=produce)
    thread.start()
    with anyio.fail_after(20):
        while len(got) < 300:
            with anyio.move_on_after(0.0002):
                while True:
                    message = await receiver.receive()
                    assert isinstance(message, Cancel)
                    got.append(message.rid)
    thread.join()
    assert got == list(range(300))
    close(receiver, sender)


async def test_a_flood_lets_the_loop_turn(context: ZmqContext, endpoint: str) -> None:
    receiver, sender = pair(context, endpoint, limit=2000)
    for rid in range(500):
        sender.post(Cancel(rid))
    await anyio.sleep(0.1)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(count)
            for _ in range(500):
                await receiver.receive()
            tasks.cancel_scope.cancel()
    assert turns >= 10
    close(receiver, sender)


def fill(sender: Sender[SchedulerMessage]) -> int:
    """Post until nothing more fits, also not after the transport has had time to move it."""
    sent = 0
    with suppress(MailboxFull):
        while True:
            sender.send_blocking(Request(1, token_ids=[1] * 4000), 0.1)
            sent += 1
    return sent


def test_post_is_bounded_and_refuses_at_once(context: ZmqContext, endpoint: str) -> None:
    receiver, sender = pair(context, endpoint, limit=8)
    assert 8 <= fill(sender) <= 400  # the kernel's socket buffer holds some beside the marks
    with pytest.raises(MailboxFull) as caught:
        sender.post(Cancel(0))
    assert caught.value.code == "queue_full"
    close(receiver, sender)


async def test_send_waits_for_room_and_has_a_deadline(context: ZmqContext, endpoint: str) -> None:
    receiver, sender = pair(context, endpoint, limit=4)
    held = fill(sender)
    started = time.monotonic()
    with pytest.raises(MailboxFull):
        await sender.send(Cancel(1), timeout_s=0.1)
    assert time.monotonic() - started > 0.09

    async def drain() -> None:
        await anyio.sleep(0.05)
        for _ in range(held):
            await receiver.receive()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain)
            tasks.start_soon(sender.send, Cancel(2), 5)
            tasks.start_soon(sender.send, Cancel(3), 5)
            await anyio.sleep(0.01)
            with pytest.raises(MailboxFull):  # never ahead of those that wait
                sender.post(Cancel(4))
        assert {(await receiver.receive()).rid for _ in range(2)} == {2, 3}  # type: ignore[union-attr]  # both are Cancel
    close(receiver, sender)


def test_blocking_send_and_wait_have_deadlines(context: ZmqContext, endpoint: str) -> None:
    receiver, sender = pair(context, endpoint, limit=4)
    started = time.monotonic()
    assert next_mail(receiver, 0.05) is None
    assert time.monotonic() - started > 0.045
    held = fill(sender)
    with pytest.raises(MailboxFull):
        sender.send_blocking(Cancel(1), 0.05)
    assert all(next_mail(receiver, 1) for _ in range(held))
    sender.send_blocking(Cancel(2), 1)
    assert next_mail(receiver, 1) == Cancel(2)
    close(receiver, sender)


def test_one_inbox_listens_at_several_endpoints(context: ZmqContext) -> None:
    with tempfile.TemporaryDirectory(prefix="mb") as folder:
        endpoints = ["inproc://both", f"ipc://{folder}/both"]
        receiver: Receiver[SchedulerMessage] = Receiver(context, endpoints, SchedulerMessage, 9)
        senders: list[Sender[SchedulerMessage]] = [
            Sender(context, endpoint, 9) for endpoint in endpoints
        ]
        for rid, sender in enumerate(senders):
            sender.post(Cancel(rid))
        assert {next_mail(receiver, 2).rid for _ in senders} == {0, 1}
        close(receiver, *senders)
        assert not list(Path(folder).iterdir())


def test_wait_any_wakes_for_either(context: ZmqContext) -> None:
    first, to_first = pair(context, "inproc://first")
    second, to_second = pair(context, "inproc://second")
    started = time.monotonic()
    wait_any([first, second], 0.03)
    assert time.monotonic() - started > 0.025
    to_second.post(Cancel(1))
    wait_any([first, second], 5)
    assert first.receive_nowait() is None
    assert second.receive_nowait() == Cancel(1)
    close(first, to_first, second, to_second)


def test_last_words_are_delivered_when_flushed(endpoint: str) -> None:
    receiving: ZmqContext = zmq.Context()
    sending: ZmqContext = receiving if endpoint.startswith("inproc") else zmq.Context()
    receiver: Receiver[SchedulerMessage] = Receiver(receiving, [endpoint], SchedulerMessage, 99)
    sender: Sender[SchedulerMessage] = Sender(sending, endpoint, 99, flush_s=2)
    for rid in range(20):
        sender.post(Cancel(rid))
    sender.close()
    if sending is not receiving:
        sending.term()
    assert [next_mail(receiver, 1) for _ in range(20)] == [Cancel(rid) for rid in range(20)]
    receiver.close()
    receiving.term()


def test_undecodable_mail_is_counted_and_dropped(context: ZmqContext) -> None:
    receiver, sender = pair(context, "inproc://junk")
    raw = sender._socket
    good = msgspec.msgpack.encode(Cancel(7))
    deep = b"\x92\xa6submit" + b"\x91" * 100_000
    bad = [b"", b"\xc1", good + b"x", b"\x92\xa6cancel\xa1\xff", b"\x91\xa6cancel", deep]
    for data in [*bad, msgspec.msgpack.encode(Cancel(-1))[:-1], good]:
        raw.send(data)
    assert next_mail(receiver, 1) == Cancel(7)
    assert receiver.undecodable == len(bad) + 1
    assert receiver.receive_nowait() is None
    close(receiver, sender)


def test_mutated_mail_never_raises(context: ZmqContext) -> None:
    receiver: Receiver[TokenizerMessage] = Receiver(
        context, ["inproc://fuzz"], TokenizerMessage | SchedulerMessage, 100
    )
    sender: Sender[Any] = Sender(context, "inproc://fuzz", 100)
    seeds = [
        msgspec.msgpack.encode(message)
        for message in (
            Request(1, RequestOptions(logit_bias=((3, 1.0),)), 2, token_ids=[1, 2, 300]),
            StepOutput(3, 1, 2, placed=[4], preempted={1: [2]}),
            Cancel(1),
        )
    ]
    chance = random.Random(11)
    count, received = 5000, 0
    for _ in range(count):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        sender._socket.send(bytes(data))
        received += receiver.receive_nowait() is not None
    assert received + receiver.undecodable == count
    assert receiver.undecodable > count / 4
    close(receiver, sender)


def test_too_large_a_message_is_refused_by_the_sender(
    context: ZmqContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "MAX_MESSAGE_BYTES", 100)
    receiver, sender = pair(context, "inproc://large")
    with pytest.raises(HearthError, match="at most 100") as caught:
        sender.post(Request(1, token_ids=list(range(200))))
    assert caught.value.code == "invalid_value"
    assert next_mail(receiver, 0.05) is None
    close(receiver, sender)


def test_a_path_too_long_is_refused_by_both_ends(context: ZmqContext) -> None:
    endpoint = "ipc:///tmp/" + "x" * 103
    check_endpoint(endpoint[:-1])
    attempts: list[Callable[[], object]] = [
        lambda: check_endpoint(endpoint),
        lambda: Receiver(context, [endpoint], Cancel, 1),
        lambda: Sender(context, endpoint, 1),
    ]
    for attempt in attempts:
        with pytest.raises(HearthError, match="has 108 bytes") as caught:
            attempt()
        assert caught.value.code == "socket_unusable"


def test_a_missing_folder_is_refused(context: ZmqContext) -> None:
    with pytest.raises(HearthError, match="cannot listen at"):
        Receiver(context, ["ipc:///tmp/no-such-folder/x"], Cancel, 1)


def test_a_limit_below_one_is_refused(context: ZmqContext) -> None:
    with pytest.raises(HearthError) as caught:
        Sender(context, "inproc://none", 0)
    assert caught.value.field == "limit"


def test_incarnations_have_addresses_of_their_own() -> None:
    sockets = SocketFolder(Path("/run/h"))
    first, second = sockets.addresses("executor", 1), sockets.addresses("executor", 2)
    assert (first.work, first.control) == (
        "ipc:///run/h/executor-1",
        "ipc:///run/h/executor-1-control",
    )
    assert not {first.work, first.control} & {second.work, second.control}
    assert first.tokenizer == second.tokenizer == sockets.tokenizer
    assert first.supervisor == second.supervisor == sockets.supervisor("executor")


def test_actors_share_nothing_but_the_tokenizer() -> None:
    sockets = SocketFolder(Path("/run/h"))
    one, other = sockets.addresses("executor", 1), sockets.addresses("encoder", 1)
    mine = {one.work, one.control, one.supervisor}
    assert not mine & {other.work, other.control, other.supervisor}


def test_a_folder_that_is_too_long_is_refused() -> None:
    with pytest.raises(HearthError) as caught:
        SocketFolder(Path("/" + "x" * 104)).addresses("executor", 1)
    assert caught.value.code == "socket_unusable"


def test_sockets_of_one_incarnation_are_removed(tmp_path: Path) -> None:
    for name in ("executor-1", "executor-1-control", "executor-10", "door"):
        (tmp_path / name).touch()
    remove_sockets(SocketFolder(tmp_path).addresses("executor", 1))
    assert {path.name for path in tmp_path.iterdir()} == {"executor-10", "door"}


HOLD = """
import sys, time
from pathlib import Path
from hearth.actors.addresses import private_folder
with private_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


def age(folder: Path, seconds: float = 3600.0) -> None:
    then = time.time() - seconds
    os.utime(folder, (then, then))


def test_it_is_for_this_user_alone_and_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    with private_folder(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "left-over").touch()
    assert not list(tmp_path.iterdir())


def test_it_lies_with_the_temporary_files_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with private_folder() as folder:
        assert folder.parent == tmp_path


def test_what_a_killed_process_left_goes_when_the_next_begins(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        left = Path(process.stdout.readline().decode().strip())
        (left / "socket").touch()
        age(left)
        remove_abandoned(tmp_path)
        assert (left / "socket").exists()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    age(left)
    with private_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_only_old_folders_of_this_kind_and_user_are_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    young, other, file = (tmp_path / name for name in ("hearth.young", "hearth-x", "hearth.file"))
    young.mkdir()
    other.mkdir()
    file.touch()
    (tmp_path / "hearth.link").symlink_to(other)
    for one in (other, file):
        age(one)
    remove_abandoned(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    age(young)
    monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
    remove_abandoned(tmp_path)
    assert young.exists()


def test_a_file_system_without_locks_serves_and_keeps_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EBADF, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    left = tmp_path / "hearth.left"
    left.mkdir()
    age(left)
    with private_folder(tmp_path) as folder:
        assert folder.is_dir()
    assert left.is_dir()
