"""What the tokenizer tells the scheduler of the executor's rows."""

from __future__ import annotations

import sys
from unittest.mock import AsyncMock

import anyio
import pytest

from hearth.actors.actor_message import FromExecutor
from hearth.actors.mailbox import MailboxFull
from hearth.actors.messages import (
    Cancel,
    ClientGone,
    Continuation,
    Deltas,
    ExecutorGone,
    Failed,
    RowsEnded,
    RowsFailed,
    RowsPlaced,
    RowsReturned,
    Step,
    Submit,
)
from hearth.runtime.request import RowToken
from hearth.runtime.text import Tokenizer
from tests.actors.test_tokenizer import house, prepare, step
from tests.runtime.text.folders import byte_level, open_tokenizer

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("engine"), byte_level())


async def test_a_row_s_return_is_passed_on_once_its_tokens_are(tokenizer: Tokenizer) -> None:
    (token,), ended = tokenizer.encode("a"), RowsReturned(1, [Continuation(1, [7])])
    async with house(tokenizer) as made:
        made.mail.post(prepare(1))
        await made.scheduler.receive()
        made.mail.post(step([(1, token)]))
        made.mail.post(ended)
        assert await made.scheduler.receive() == ended
        assert isinstance(made.door.receive_nowait(), Deltas)


@pytest.mark.parametrize(
    "message", [RowsEnded(1, [1]), Step(1, [1], [RowToken(0, 5, finish="stop")], 1.0)]
)
async def test_an_end_that_cannot_be_passed_on_ends_the_actor(
    tokenizer: Tokenizer, message: FromExecutor
) -> None:
    async def run() -> None:
        async with house(tokenizer) as made:
            full = AsyncMock(side_effect=MailboxFull("inproc://s"))
            made.actor._to_scheduler.send = full  # type: ignore[method-assign] # a full mailbox
            made.mail.post(message)
            await anyio.sleep(5)

    with pytest.raises(ExceptionGroup) as raised:
        await run()
    assert "MailboxFull" in repr(raised.value)


async def test_the_ends_of_rows_are_passed_on_behind_their_tokens(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    async with house(tokenizer) as made:
        for rid in (1, 2):
            made.mail.post(prepare(rid))
            await made.scheduler.receive()
        made.mail.post(step([(1, a), (2, a)]))
        tokens = [
            RowToken(0, a, finish="length"),
            RowToken(1, a),
            RowToken(2, -1, error="internal"),
        ]
        made.mail.post(Step(1, [1, 2, 3], tokens, ended=1.5))
        assert await made.scheduler.receive() == RowsEnded(1, [1, 3])
        assert [type(made.door.receive_nowait()) for _ in range(2)] == [Deltas, Deltas]
        failed = RowsFailed(1, [2], "executor_failed", "again")
        made.mail.post(failed)
        assert await made.scheduler.receive() == failed
        assert made.door.receive_nowait() == Failed(2, "executor_failed", "again")


async def test_a_dead_executor_s_rows_are_settled_and_its_late_mail_is_dropped(
    tokenizer: Tokenizer,
) -> None:
    (a,) = tokenizer.encode("a")
    async with house(tokenizer) as made:
        for rid in (1, 2):
            made.mail.post(prepare(rid))
            await made.scheduler.receive()
        made.mail.post(RowsPlaced(1, [1]))
        made.mail.post(ExecutorGone(1, [1, 2], "it died"))
        made.mail.post(RowsPlaced(1, [2]))
        made.mail.post(step([(2, a)]))
        heard = [await made.scheduler.receive() for _ in range(3)]
        assert heard == [
            RowsPlaced(1, [1]),
            RowsFailed(1, [1], "executor_failed", "it died"),
            RowsReturned(1, unplaced=[2]),
        ]
        assert await made.door.receive() == Failed(1, "executor_failed", "it died")
        # The next one may run it.
        made.mail.post(RowsPlaced(2, [2]))
        assert await made.scheduler.receive() == RowsPlaced(2, [2])
        made.mail.post(Step(2, [2], [RowToken(0, a)], 2.0, {2: 1.5}))
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert ([row.rid for row in deltas.rows], deltas.placed) == ([2], {2: 1.5})


async def test_a_client_that_has_gone_is_told_of_behind_all_that_it_asked(
    tokenizer: Tokenizer,
) -> None:
    async with house(tokenizer) as made:
        made.mail.post(prepare(1))
        assert isinstance(await made.scheduler.receive(), Submit)
        for message in (Cancel(1), ClientGone(7)):
            made.mail.post(message)
        assert [await made.scheduler.receive() for _ in range(2)] == [Cancel(1), ClientGone(7)]


async def test_what_the_prefix_cache_gave_is_told_beside_the_text(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    async with house(tokenizer) as made:
        made.mail.post(prepare(1))
        await made.scheduler.receive()
        made.mail.post(Step(1, [1], [RowToken(0, a)], 2.0, {1: 1.5}, cached={1: 32}))
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert deltas.cached == {1: 32}
