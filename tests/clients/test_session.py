from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import zmq

from clients.conformance.scripted import Peer, packed
from hearth.daemon.door.keys import add_client, make_server_keys, read_keys
from hearth_client import (
    AsyncClient,
    Client,
    ClientShared,
    ConnectionLost,
    ConnectionTimeout,
    NotAllowed,
    ProtocolViolation,
    async_session,
)
from hearth_client.channel import Channel
from tests.daemon.door.harness import Harness, running_door


def blocking(address: str, **options: Any) -> list[int]:
    with Client(address, **options) as client:
        return client.tokenize("x")


async def ask_once(address: str, options: Any) -> list[int]:
    async with AsyncClient(address, **options) as client:
        return await client.tokenize("x")


def by_asyncio(address: str, **options: Any) -> list[int]:
    return anyio.run(ask_once, address, options)


def by_trio(address: str, **options: Any) -> list[int]:
    return anyio.run(ask_once, address, options, backend="trio")


Ask = Callable[..., list[int]]
WAYS: Sequence[Ask] = (blocking, by_asyncio, by_trio)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


@pytest.fixture
def door() -> Iterator[Harness]:
    with running_door() as harness:
        yield harness


def answer(peer: Peer) -> None:
    """Answer `tokenize`, with a frame too many."""
    peer.send(packed({"t": "tokens", "id": peer.take("tokenize")["id"], "tokens": [1]}), b"more")


@pytest.mark.parametrize("ask", WAYS)
def test_an_old_server_is_greeted_again_without_features(
    ask: Ask, short_folder: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with ThreadPoolExecutor(1) as pool, Peer(short_folder / "s", context) as peer:
        asked = pool.submit(ask, peer.address)
        assert peer.take("hello")["features"]
        peer.say(t="error", code="unsupported_option", field="features", message="No.")
        assert "features" not in peer.welcome()
        answer(peer)
        assert asked.result() == [1]


@pytest.mark.parametrize("ask", WAYS)
def test_a_daemon_that_goes_before_its_welcome_is_greeted_anew(
    ask: Ask, short_folder: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with Peer(short_folder / "s", context) as peer:
            asked = pool.submit(ask, peer.address, timeout=10)
            peer.take("hello")
        with Peer(short_folder / "s", context) as peer:
            peer.welcome()
            answer(peer)
            assert asked.result() == [1]


@pytest.mark.parametrize("ask", WAYS)
def test_a_daemon_that_says_nothing_more_is_lost(
    ask: Ask, short_folder: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with ThreadPoolExecutor(1) as pool, Peer(short_folder / "s", context) as peer:
        asked = pool.submit(ask, peer.address, silence_s=0.2)
        peer.welcome()
        with pytest.raises(ConnectionTimeout):
            asked.result()


def full(*_: object) -> None:
    raise ConnectionTimeout("the daemon does not take messages any more")


def test_a_daemon_that_takes_nothing_more_is_lost(
    door: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(door.path) as client:
        generation = client.generate("hang")
        client.tokenize("x")
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send", full)
            generation.cancel()
        with pytest.raises(ConnectionTimeout):
            generation.text()
        assert client.tokenize("a") == [97]


async def test_a_renewal_that_cannot_be_sent_is_a_loss(
    door: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(door.path) as client:
        generation = await client.generate("hang")
        client._session._tick()
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send", full)
            client._session._connection.renew_at = 0.0
            client._session._tick()
            client._session._tick()
        with pytest.raises(ConnectionTimeout):
            await generation.text()


def fill(channel: Channel) -> None:
    for _ in range(2000):
        channel.send(b"")


async def test_many_answers_leave_others_their_turn(
    door: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_session, "_BURST", 1)
    async with AsyncClient(door.path) as client:
        first, second = [await client.generate("count", max_tokens=9) for _ in range(2)]
        assert first.id != second.id
        assert await first.text() == await second.text() == "0 1 2 3 4 5 6 7 8 "


def test_a_channel_holds_a_bounded_number_of_messages(short_folder: Path) -> None:
    channel = Channel(f"ipc://{short_folder}/nobody")
    with pytest.raises(ConnectionTimeout):
        fill(channel)
    channel.close()


def test_a_channel_that_is_forgotten_closes_itself(short_folder: Path) -> None:
    with pytest.warns(ResourceWarning, match="was not closed"):
        Channel(f"ipc://{short_folder}/nobody")


def test_the_end_of_the_program_leaves_a_channel_to_its_thread(short_folder: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        channel = pool.submit(Channel, f"ipc://{short_folder}/nobody").result()
        with pytest.warns(ResourceWarning, match="was not closed"):
            channel._forgotten()  # As the interpreter calls it at its end.
        channel.send(b"")
        channel.close()


def test_who_does_not_use_trio_needs_none(door: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trio")
    assert by_asyncio(str(door.path)) == [120]
    assert "trio" not in sys.modules


async def test_a_timeout_that_comes_with_the_welcome_is_none(door: Harness) -> None:
    async with AsyncClient(door.path) as client:
        client._session._give_up()
        assert await client.tokenize("a") == [97]


def test_a_copy_leaves_the_session_to_its_owner(door: Harness) -> None:
    with Client(door.path) as client:
        own, channel = client._session._process, client._session._channel
        client._session._process = -1
        with pytest.raises(ClientShared):
            client.status()
        client.close()
        client._session._process, client._session._channel = own, channel


def test_a_forgotten_request_that_has_ended_is_not_cancelled(door: Harness) -> None:
    with Client(door.path) as client:
        generation = client.generate("count", max_tokens=1)
        generation.text()
        client._session._forgotten.append(generation._exchange)
        client._session._send_cancels()
        assert not client._session._forgotten
        assert client.tokenize("a") == [97]


def test_a_session_that_was_never_opened(door: Harness) -> None:
    client = Client(door.path)
    client._session.send(b"")
    client._session._wait(0.0)
    with pytest.raises(ConnectionLost):
        client._session._opened()


def test_a_result_before_its_end_is_none(door: Harness) -> None:
    with Client(door.path) as client:
        generation = client.generate("hang")
        with pytest.raises(ProtocolViolation):
            generation._result()


def test_a_daemon_by_tcp_knows_its_clients(tmp_path: Path) -> None:
    public = make_server_keys(tmp_path / "keys")
    key = tmp_path / "robot.key_secret"
    add_client(tmp_path / "keys", "robot", hand_over=key)
    stranger = zmq.curve_keypair()[1].decode()
    with running_door(keys=read_keys(tmp_path / "keys")) as door:
        address = f"tcp://127.0.0.1:{door.door.tcp_port}"
        with Client(address, client_key=key) as client:
            assert client.tokenize("a") == [97]
        with pytest.raises(NotAllowed, match="does not list this key"):
            Client(address, client_key=stranger, server_key=public).connect()
        other = zmq.curve_keypair()[0].decode()
        with pytest.raises(ConnectionTimeout, match="is server_key its public key"):
            Client(address, client_key=key, server_key=other, timeout=0.3).connect()
