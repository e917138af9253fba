import signal
from collections.abc import AsyncIterator

import pytest
import structlog

from hearth.daemon.signals import SignalRequests, held_signals
from hearth.runtime.errors import HearthError

MANAGED = {"NOTIFY_SOCKET": "/run/systemd/notify"}


async def received(*numbers: signal.Signals) -> AsyncIterator[signal.Signals]:
    for number in numbers:
        yield number


async def never() -> None:
    pytest.fail("nobody asked for it")


def test_a_terminal_that_closes_asks_for_a_stop_unless_it_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.SIG_DFL)
    assert signal.SIGHUP in SignalRequests({}).signals
    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.SIG_IGN)
    assert SignalRequests({}).signals == [signal.SIGTERM, signal.SIGINT]
    assert signal.SIGHUP in SignalRequests(MANAGED).signals


def test_a_hangup_before_there_is_something_to_reload_ends_nothing_under_a_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignored: list[tuple[int, object]] = []
    monkeypatch.setattr(signal, "signal", lambda number, act: ignored.append((number, act)))
    SignalRequests({}).nothing_to_reload()
    assert ignored == []
    SignalRequests(MANAGED).nothing_to_reload()
    assert ignored == [(signal.SIGHUP, signal.SIG_IGN)]


@pytest.mark.anyio
async def test_at_a_terminal_each_signal_asks_for_a_stop() -> None:
    asked = SignalRequests({})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        assert await asked.stop(received(number), never) is number


@pytest.mark.anyio
async def test_under_a_manager_a_hangup_reloads_and_is_no_stop() -> None:
    calls: list[None] = []

    async def refused() -> None:
        calls.append(None)
        raise HearthError("invalid_value", "the file is wrong")

    signals = received(signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    asked = SignalRequests(MANAGED)
    assert await asked.stop(signals, refused) is signal.SIGTERM
    assert len(calls) == 2
    assert await asked.stop(signals) is signal.SIGINT


@pytest.mark.anyio
async def test_a_fault_in_a_reload_ends_nothing() -> None:
    async def faulty() -> None:
        raise OSError("the disk is gone")

    with structlog.testing.capture_logs() as logs:
        stopped = await SignalRequests(MANAGED).stop(
            received(signal.SIGHUP, signal.SIGTERM), faulty
        )
    assert stopped is signal.SIGTERM
    assert [line["event"] for line in logs] == ["a reload failed"]


def test_signals_are_held_until_they_are_sent_again() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("it is held"))
    try:
        with held_signals() as send_again:
            signal.raise_signal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
            assert heard == []
            send_again()
            send_again()
        assert heard == [signal.SIGTERM]
        with held_signals():
            signal.raise_signal(signal.SIGTERM)
            assert len(heard) == 1
        assert len(heard) == 2, "who was there before hears it at the end"
    finally:
        signal.signal(signal.SIGTERM, before)
