from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from actors.addresses import AddressBook, Placement
from actors.host import main, run_actor
from actors.mailbox import Receiver, Sender, ZmqContext
from actors.messages import (
    ActorFailed,
    ActorHello,
    ActorReady,
    ExecutorLimits,
    ExecutorMessage,
    RowsFailed,
    RunBatch,
    SupervisorMessage,
    TokenizerMessage,
)
from actors.roles import ExecutorRole, HostConfig
from runtime.engine_folder import write_config
from runtime.errors import HearthError
from runtime.executor.simulated_engine import simulated_config
from runtime.options import RuntimeOptions
from runtime.request import RequestOptions, RowRequest


class House:
    """The supervisor's and tokenizer's inboxes, and the role of an executor process."""

    def __init__(self, folder: Path, context: ZmqContext) -> None:
        engine = folder / "engine"
        engine.mkdir()
        write_config(engine, simulated_config(capacity=64, max_batch=4, step_ms=10.0))
        book = AddressBook(folder=str(folder), placement=Placement())
        self.context = context
        self.folder = str(folder)
        self.role = ExecutorRole(
            addresses=book.seen_from("executor"),
            inboxes=book.executor(1),
            engine="engine",
            options=RuntimeOptions(max_batch=3),
        )
        self.supervisor: Receiver[SupervisorMessage] = Receiver(
            context, book.endpoints("supervisor"), SupervisorMessage, 100
        )
        self.tokenizer: Receiver[TokenizerMessage] = Receiver(
            context, book.endpoints("tokenizer"), TokenizerMessage, 100
        )
        self.work: Sender[ExecutorMessage] = Sender(context, self.role.inboxes.work, 10)

    def argument(self, parent: int) -> str:
        config = HostConfig(
            name="executor-1", role=self.role, parent=parent, folder=self.folder, log_level="error"
        )
        return msgspec.json.encode(config).decode()

    def start(self, parent: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "actors.host", self.argument(parent)])

    def wait_until_ready(self) -> ActorReady:
        while (message := self.supervisor.wait(30)) is not None:
            if isinstance(message, ActorReady):
                return message
        raise AssertionError("the actor never became ready")


@pytest.fixture
def house(short_folder: Path) -> Iterator[House]:
    context: ZmqContext = zmq.Context()
    made = House(short_folder, context)
    yield made
    for mailbox in (made.supervisor, made.tokenizer, made.work):
        mailbox.close()
    context.term()


def test_an_actor_process_says_hello_and_tells_what_it_can_do(house: House) -> None:
    process = house.start(os.getpid())
    hello = house.supervisor.wait(30)
    assert hello == ActorHello("executor-1", process.pid)
    ready = house.wait_until_ready()
    assert (ready.name, ready.pid) == ("executor-1", process.pid)
    assert ready.limits == ExecutorLimits(3, 63, 64)
    assert (ready.facts["capacity"], ready.facts["backend"]) == (64, "simulated")
    process.terminate()
    assert process.wait(10) == 0


def test_ctrl_c_is_left_to_the_daemon_and_sigterm_ends_in_order(house: House) -> None:
    process = house.start(os.getpid())
    house.wait_until_ready()
    options = RequestOptions(max_tokens=63, ignore_eos=True)
    row = RowRequest(token_ids=[1], prompt_length=1, options=options)
    house.work.post(RunBatch(1, {7: row}))
    assert house.tokenizer.wait(10)
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    assert house.tokenizer.wait(10)
    process.send_signal(signal.SIGTERM)
    while not isinstance(message := house.tokenizer.wait(10), RowsFailed):
        assert message is not None
    assert (message.rids, message.code) == ([7], "shutting_down")
    assert process.wait(10) == 0


def test_a_process_of_another_parent_does_not_start(house: House) -> None:
    assert house.start(parent=1).wait(30) == 1
    assert house.supervisor.wait(0.1) is None


def test_an_actor_dies_with_the_daemon(house: House, tmp_path: Path) -> None:
    """Also when the daemon is killed and can tell nobody."""
    script = tmp_path / "daemon.py"
    script.write_text(
        textwrap.dedent("""
        import os, subprocess, sys, time
        argument = sys.argv[1].replace('"parent":0', f'"parent":{os.getpid()}')
        child = subprocess.Popen([sys.executable, "-m", "actors.host", argument])
        child.wait()
        """)
    )
    daemon = subprocess.Popen([sys.executable, script, house.argument(parent=0)])
    pid = house.wait_until_ready().pid
    daemon.kill()
    daemon.wait(10)
    deadline = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether it runs; an orphan that has ended may be left as a zombie by a careless init."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_failure_to_load_is_told_with_its_field(house: House) -> None:
    role = msgspec.structs.replace(
        house.role, engine=f"{house.folder}/engine", options=RuntimeOptions(max_batch=99)
    )
    with pytest.raises(HearthError):
        run_actor("executor-1", role, house.context, own_process=False)
    assert isinstance(house.supervisor.wait(5), ActorHello)
    failed = house.supervisor.wait(5)
    assert isinstance(failed, ActorFailed)
    assert (failed.name, failed.code, failed.field) == ("executor-1", "invalid_value", "max_batch")


def test_an_unexpected_failure_is_told_in_our_words(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise ValueError("a library's text")

    monkeypatch.setattr("actors.open_executor.open_executor", fail)
    with pytest.raises(ValueError, match="library"):
        run_actor("executor-1", house.role, house.context, own_process=False)
    house.supervisor.wait(5)
    failed = house.supervisor.wait(5)
    assert isinstance(failed, ActorFailed)
    assert failed.code == "internal"
    assert "library" not in failed.message


@pytest.mark.parametrize("arguments", [[], ["not json"], ['{"name": 1}']])
def test_a_wrong_argument_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "started by the daemon" in capsys.readouterr().err
