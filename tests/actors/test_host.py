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
from msgspec import structs

from hearth.actors.addresses import SocketFolder
from hearth.actors.host import ROLES, main, run_actor
from hearth.actors.mailbox import Receiver, Sender, ZmqContext
from hearth.actors.messages import (
    ExecutorControl,
    ExecutorLimits,
    ExecutorMessage,
    Schedule,
    Shutdown,
    StepOutput,
    TokenizerMessage,
)
from hearth.actors.roles import ExecutorSettings, Host, HostConfig, ReadyActor, Role
from hearth.actors.settings import LogSettings
from hearth.actors.supervisor_messages import (
    ActorFailed,
    ActorHello,
    ActorLoading,
    ActorReady,
    SupervisorMessage,
)
from hearth.runtime.engine_folder import write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions, RowRequest
from tests.actors.mailboxes import next_mail


class Harness:
    """The supervisor's and tokenizer's inboxes, and what the process of an executor is told."""

    def __init__(self, folder: Path, context: ZmqContext) -> None:
        engine = folder / "engine"
        engine.mkdir()
        write_config(engine, simulated_config(capacity=64, max_batch=4, step_ms=10.0))
        sockets = SocketFolder(folder)
        addresses = sockets.addresses("executor", 1)
        self.context = context
        self.settings = ExecutorSettings(engine=str(engine), options=RuntimeOptions(max_batch=3))
        self.config = HostConfig(
            name="executor-1",
            role="executor",
            settings=raw(self.settings),
            addresses=addresses,
            parent=os.getpid(),
            logs=LogSettings(log_level="error"),
        )
        self.supervisor: Receiver[SupervisorMessage] = Receiver(
            context, [addresses.supervisor], SupervisorMessage, 100
        )
        self.tokenizer: Receiver[TokenizerMessage] = Receiver(
            context, [addresses.tokenizer], TokenizerMessage, 100
        )
        self.loading: list[ActorLoading] = []
        self.work: Sender[ExecutorMessage] = Sender(context, addresses.work, 10)
        self.control: Sender[ExecutorControl] = Sender(context, addresses.control, 10)

    def start(self, parent: int) -> subprocess.Popen[bytes]:
        config = structs.replace(self.config, parent=parent)
        return subprocess.Popen([sys.executable, "-m", "hearth.actors.host", argument(config)])

    def next_word(self) -> SupervisorMessage | None:
        """What the supervisor is told next, but for how the loading goes on."""
        while True:
            word: SupervisorMessage | None = next_mail(self.supervisor, 5)
            if not isinstance(word, ActorLoading):
                return word
            self.loading.append(word)

    def wait_until_ready(self) -> ActorReady:
        while (message := next_mail(self.supervisor, 30)) is not None:
            if isinstance(message, ActorReady):
                return message
            if isinstance(message, ActorLoading):
                self.loading.append(message)
        raise AssertionError("the actor never became ready")


def raw(settings: msgspec.Struct) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(settings))


def argument(config: HostConfig) -> str:
    return msgspec.json.encode(config).decode()


@pytest.fixture
def harness(short_folder: Path) -> Iterator[Harness]:
    context: ZmqContext = zmq.Context()
    made = Harness(short_folder, context)
    yield made
    for mailbox in (made.supervisor, made.tokenizer, made.work, made.control):
        mailbox.close()
    context.term()


def test_an_actor_process_says_hello_and_tells_what_it_can_do(harness: Harness) -> None:
    process = harness.start(os.getpid())
    hello = next_mail(harness.supervisor, 30)
    assert hello == ActorHello("executor-1", process.pid)
    ready = harness.wait_until_ready()
    assert (ready.name, ready.pid) == ("executor-1", process.pid)
    stages = list(dict.fromkeys(one.stage for one in harness.loading))
    assert stages == ["opening", "capturing", "answering"]
    assert {one.name for one in harness.loading} == {"executor-1"}
    assert ready.limits == ExecutorLimits(3, 63, 64)
    assert (ready.facts["capacity"], ready.facts["backend"]) == (64, "simulated")
    # Where memory ends the system takes the executor, and the daemon lives.
    assert int(Path(f"/proc/{process.pid}/oom_score_adj").read_text()) >= 500
    harness.control.post(Shutdown())
    assert process.wait(10) == 0


def test_signals_are_left_to_the_daemon_and_its_word_ends_in_order(harness: Harness) -> None:
    process = harness.start(os.getpid())
    harness.wait_until_ready()
    options = RequestOptions(max_tokens=63, ignore_eos=True)
    row = RowRequest(token_ids=[1], prompt_length=1, options=options)
    harness.work.post(Schedule(1, 1, 0, [7], {7: row}))
    assert next_mail(harness.tokenizer, 10)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
    for _ in range(5):
        assert isinstance(next_mail(harness.tokenizer, 10), StepOutput)
    harness.control.post(Shutdown())
    while not (message := next_mail(harness.tokenizer, 10)).failed:
        pass
    (failed,) = message.failed
    assert (failed.rids, failed.code) == ([7], "shutting_down")
    assert process.wait(10) == 0


def test_a_process_of_another_parent_does_not_start(harness: Harness) -> None:
    assert harness.start(parent=1).wait(30) == 1
    assert next_mail(harness.supervisor, 0.1) is None


def test_an_actor_dies_with_the_daemon(harness: Harness, tmp_path: Path) -> None:
    """Also when the daemon is killed and can tell nobody."""
    script = tmp_path / "daemon.py"
    script.write_text(
        textwrap.dedent("""
        import os, subprocess, sys, time
        argument = sys.argv[1].replace('"parent":0', f'"parent":{os.getpid()}')
        child = subprocess.Popen([sys.executable, "-m", "hearth.actors.host", argument])
        child.wait()
        """)
    )
    daemon = subprocess.Popen(
        [sys.executable, script, argument(structs.replace(harness.config, parent=0))]
    )
    pid = harness.wait_until_ready().pid
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


def test_a_failure_to_load_is_told_with_its_field(harness: Harness) -> None:
    settings = structs.replace(harness.settings, options=RuntimeOptions(max_batch=99))
    config = structs.replace(harness.config, settings=raw(settings))
    with pytest.raises(HearthError):
        run_actor(config, harness.context)
    assert isinstance(harness.next_word(), ActorHello)
    failed = harness.next_word()
    assert isinstance(failed, ActorFailed)
    assert (failed.name, failed.code, failed.field) == ("executor-1", "invalid_value", "max_batch")


def test_an_unexpected_failure_is_told_in_our_words(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise ValueError("a library's text")

    monkeypatch.setattr("hearth.actors.executor.open.open_executor", fail)
    with pytest.raises(ValueError, match="library"):
        run_actor(harness.config, harness.context)
    harness.next_word()
    failed = harness.next_word()
    assert isinstance(failed, ActorFailed)
    assert failed.code == "internal"
    assert "library" not in failed.message


class CounterSettings(msgspec.Struct, forbid_unknown_fields=True):
    size: int


def test_a_further_role_is_one_entry(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[str] = []

    def prepare(host: Host, settings: CounterSettings) -> ReadyActor:
        return ReadyActor(lambda: worked.append(host.name), {"size": settings.size})

    monkeypatch.setitem(ROLES, "counter", Role(CounterSettings, prepare))
    config = structs.replace(
        harness.config, name="counter-1", role="counter", settings=raw(CounterSettings(7))
    )
    run_actor(config, harness.context)
    assert worked == ["counter-1"]
    assert [harness.next_word() for _ in range(2)] == [
        ActorHello("counter-1", os.getpid()),
        ActorReady("counter-1", os.getpid(), {"size": 7}),
    ]


def test_a_role_that_nobody_knows_is_told(harness: Harness) -> None:
    with pytest.raises(KeyError):
        run_actor(structs.replace(harness.config, role="cook"), harness.context)
    harness.next_word()
    assert isinstance(harness.next_word(), ActorFailed)


@pytest.mark.parametrize("arguments", [[], ["not json"], ['{"name": 1}']])
def test_a_wrong_argument_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "started by the daemon" in capsys.readouterr().err
