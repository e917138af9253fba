from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

from hearth.daemon.door.sessions import Session, Sessions
from hearth_client import (
    AsyncClient,
    Client,
    ClientClosed,
    ClientShared,
    ConnectionLost,
    ConnectionRefused,
    ConnectionTimeout,
    ExecutorFailed,
    InvalidValue,
    async_client,
)
from hearth_client.trio_loop import TrioLoop
from tests.daemon.door.harness import Harness, running_door, until


@pytest.fixture
def door() -> Iterator[Harness]:
    with running_door() as harness:
        yield harness


async def test_a_stream_and_what_it_leaves(door: Harness) -> None:
    async with AsyncClient(door.path) as client:
        generation = await client.generate("count", max_tokens=3)
        assert [delta.text async for delta in generation] == ["0 ", "1 ", "2 "]
        assert await generation.text() == "0 1 2 "
        assert generation.tokens == [0, 1, 2]
        assert generation.done is not None
        assert generation.done.reason == "length"


async def test_tasks_share_a_client(door: Harness) -> None:
    texts: dict[int, str] = {}

    async with AsyncClient(door.path) as client, anyio.create_task_group() as tasks:

        async def one(count: int) -> None:
            texts[count] = await (await client.generate("count", max_tokens=count)).text()

        for count in range(1, 30):
            tasks.start_soon(one, count)
    assert texts == {count: "".join(f"{i} " for i in range(count)) for count in range(1, 30)}


async def test_cancelled_waits_lose_nothing(door: Harness) -> None:
    async with AsyncClient(door.path) as client:
        generation = await client.generate("count", max_tokens=100)
        seen: list[int] = []
        while generation.done is None or len(seen) < 100:
            with anyio.move_on_after(0.0005):
                async for delta in generation:
                    seen += delta.tokens
        assert seen == list(range(100))


async def test_leaving_an_async_with_cancels(door: Harness) -> None:
    async with AsyncClient(door.path) as client:
        async with await client.generate("hang") as generation:
            pass
        assert await generation.text() == ""
        assert generation.done is not None
        assert generation.done.reason == "cancelled"


async def drop_and_break(client: AsyncClient) -> None:
    async for _ in await client.generate("count"):
        break


async def drop_and_close(client: AsyncClient) -> None:
    generation = await client.generate("count")
    await anext(generation)
    await generation.aclose()
    assert (await generation.result()).reason == "cancelled"


async def time_out(client: AsyncClient) -> None:
    with pytest.raises(TimeoutError), anyio.fail_after(0.05):
        async for _ in await client.generate("hang"):
            pass


KEPT: list[object] = []


async def cancel_a_task_that_keeps_it(client: AsyncClient) -> None:
    KEPT.append(generation := await client.generate("hang"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generation.text)
        await client.tokenize("a")
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "leave", [drop_and_break, drop_and_close, time_out, cancel_a_task_that_keeps_it]
)
async def test_a_reply_that_nobody_reads_any_more_is_cancelled(
    door: Harness, leave: Callable[[AsyncClient], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_client, "_RETURN_S", 0.05)
    async with AsyncClient(door.path) as client:
        await leave(client)
        gc.collect()
        with anyio.fail_after(10):
            while len(door.actors.cancelled) < 1:
                await client.tokenize("a")
    KEPT.clear()


async def test_what_is_forgotten_in_another_thread_or_after_the_loop_does_no_harm(
    door: Harness,
) -> None:
    async with AsyncClient(door.path) as client:
        kept = [await client.generate("hang")]
        await anyio.to_thread.run_sync(kept.clear)
        with anyio.fail_after(10):
            while not door.actors.cancelled:
                await client.tokenize("a")


async def test_a_missing_daemon_is_told_at_once() -> None:
    with tempfile.TemporaryDirectory(prefix="ha") as folder:
        client = AsyncClient(Path(folder) / "none.sock")
        with anyio.fail_after(4), pytest.raises(ConnectionRefused, match="No such file"):
            await client.connect()
        await client.close()


async def test_conversions_status_and_errors(door: Harness) -> None:
    async with AsyncClient(door.path) as client:
        assert await client.tokenize("Hi") == [72, 105]
        assert await client.detokenize([72, 105]) == "Hi"
        assert (await client.status()).engine == {"layers": 2}
        with pytest.raises(InvalidValue, match="top_p"):
            await (await client.generate("x", top_p=3.0)).text()
        with pytest.raises(ExecutorFailed) as caught:
            await (await client.generate("fail")).text()
        assert caught.value.text == "0 ", "what had come is not lost"


async def test_the_loop_renews_while_tasks_do_other_things(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renew, renewals = Sessions.renew, list[float]()

    def noted(sessions: Sessions, session: Session, now: float) -> None:
        renewals.append(now)
        renew(sessions, session, now)

    monkeypatch.setattr(Sessions, "renew", noted)
    with running_door(lease_s=0.6) as door:
        async with AsyncClient(door.path) as client:
            generation = await client.generate("hang")
            asked = renewals[-1]
            await anyio.to_thread.run_sync(until, lambda: renewals[-1] - asked > 0.6)
            client.cancel(generation)
            assert await generation.text() == ""


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("option", "value"),
    [("silence_s", 0.0), ("silence_s", float("nan")), ("timeout", -1.0), ("timeout", float("nan"))],
)
def test_times_that_are_none_are_refused(
    client: type[Client | AsyncClient], option: str, value: float
) -> None:
    with pytest.raises(InvalidValue) as caught:
        client("/nowhere/h.sock", **{option: value})  # type: ignore[arg-type] # one of several options
    assert caught.value.field == option


@pytest.mark.parametrize("run", [asyncio.run, lambda awaitable: trio.run(_awaited, awaitable)])
def test_another_loop_is_told_to_make_a_client_of_its_own(
    door: Harness, run: Callable[[Awaitable[Any]], Any]
) -> None:
    client = AsyncClient(door.path)
    generation = run(client.generate("hang"))
    for use in (client.connect, generation.text):
        with pytest.raises(ClientShared, match="another loop"):
            run(use())
    run(client.close())


async def _awaited(awaitable: Awaitable[object]) -> object:
    return await awaitable


async def test_a_second_reader_of_a_generation_is_refused(door: Harness) -> None:
    async with AsyncClient(door.path) as client, anyio.create_task_group() as tasks:
        generation = await client.generate("hang")
        tasks.start_soon(generation.text)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ClientShared, match="another task"):
            await generation.text()
        client.cancel(generation)


async def test_nobody_answers() -> None:
    with tempfile.TemporaryDirectory(prefix="ha") as folder:
        client = AsyncClient(Path(folder) / "none.sock", timeout=0.1)
        with pytest.raises(ConnectionTimeout):
            await client.connect()
        await client.close()
        with pytest.raises(ClientClosed):
            await client.status()


async def test_a_daemon_that_goes_is_noticed_at_once() -> None:
    with tempfile.TemporaryDirectory(prefix="ha") as folder:
        path = Path(folder) / "h.sock"
        client = AsyncClient(path, timeout=10)
        with running_door(path=path) as door:
            generation = await client.generate("hang")
            await client.tokenize("a")
            door.on_loop(door.door._tracker.sessions._by_rid.clear)  # no last words
        with pytest.raises(ConnectionLost, match="closed the connection"):
            await generation.text()
        with running_door(path=path):
            assert await client.tokenize("a") == [97]
            await client.close()


async def test_an_interrupted_handshake_leaves_nothing_behind(door: Harness) -> None:
    with tempfile.TemporaryDirectory(prefix="ha") as folder:
        client = AsyncClient(Path(folder) / "none.sock", timeout=5)
        with anyio.move_on_after(0.05):
            await client.connect()
        assert client._session._channel is None
        await client.close()
    other, epochs = AsyncClient(door.path), []

    async def connect() -> None:
        epochs.append((await other.connect()).epoch)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(connect)
    assert len(epochs) == 5
    assert door.sessions() == 1, "one task opens the session, the others wait"
    await other.close()


def test_what_outlives_its_loop_does_no_harm(
    door: Harness, anyio_backend: tuple[str, dict[str, Any]]
) -> None:
    async def leave() -> tuple[AsyncClient, Coroutine[Any, Any, str]]:
        client = AsyncClient(door.path)
        waits = (await client.generate("hang")).text()
        waits.send(None)
        return client, waits

    backend, options = anyio_backend
    client, waits = anyio.run(leave, backend=backend, backend_options=options)
    waits.close()
    anyio.run(client.close, backend=backend, backend_options=options)
    until(lambda: door.sessions() == 0)


def test_loops_of_one_run_of_trio_are_one() -> None:
    async def made_twice() -> set[TrioLoop]:
        return {TrioLoop(), TrioLoop()}

    assert len(trio.run(made_twice)) == 1
