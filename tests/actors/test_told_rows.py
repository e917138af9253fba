"""What the tokenizer tells the scheduler of the executor's rows."""

from __future__ import annotations

import sys
from unittest.mock import AsyncMock

import anyio
import pytest

from hearth.actors.mailbox import MailboxFull
from hearth.actors.messages import (
    Cancel,
    ClientGone,
    Deltas,
    ExecutorLost,
    Failed,
    Request,
    StepOutput,
)
from hearth.runtime.request import RowToken
from hearth.runtime.text import Tokenizer
from tests.actors.simulation import LIMITS, output, ready
from tests.actors.test_tokenizer import house, prepare, step, stepped
from tests.runtime.text.folders import byte_level, open_tokenizer

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("engine"), byte_level())


async def test_a_row_s_return_is_passed_on_once_its_tokens_are(tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("a")
    async with house(tokenizer) as made:
        made.mail.post(prepare(1))
        await made.scheduler.receive()
        made.mail.post(step([(1, token)]))
        ended = output(preempted={1: [7]})
        made.mail.post(ended)
        assert await made.scheduler.receive() == ended
        assert isinstance(made.door.receive_nowait(), Deltas)


@pytest.mark.parametrize("message", [output(seq=1), step([(1, 5)], finish="stop")])
async def test_an_end_that_cannot_be_passed_on_ends_the_actor(
    tokenizer: Tokenizer, message: StepOutput
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
        ended = stepped([1, 2, 3], tokens)
        made.mail.post(ended)
        told = await made.scheduler.receive()
        assert isinstance(told, StepOutput)
        assert (told.number, told.finished, told.tokens) == (ended.number, [1, 3], [])
        assert [type(made.door.receive_nowait()) for _ in range(2)] == [Deltas, Deltas]
        failed = output(failed=[Failed([2], "executor_failed", "again")])
        made.mail.post(failed)
        assert await made.scheduler.receive() == failed
        assert made.door.receive_nowait() == Failed([2], "executor_failed", "again")


async def test_that_an_executor_died_is_heard_behind_all_it_told_and_nothing_more_of_it(
    tokenizer: Tokenizer,
) -> None:
    (a,) = tokenizer.encode("a")
    async with house(tokenizer) as made:
        made.mail.post(prepare(2))
        await made.scheduler.receive()
        placed, late = output(placed=[1]), output(placed=[2])
        # The next one may run what nobody heard of.
        another, again = ready(LIMITS, 2), output(2, placed=[2])
        dead = (placed, placed, ExecutorLost("it died"), late, step([(2, a)]))
        for message in (*dead, another, late, again):
            made.mail.post(message)
        heard = [await made.scheduler.receive() for _ in range(4)]
        assert heard == [placed, ExecutorLost("it died"), another, again]
        first = output(2, rids=[2], tokens=[RowToken(0, a)], ended=2.0, begun={2: 1.5})
        made.mail.post(first)
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert ([row.rid for row in deltas.rows], deltas.placed) == ([2], {2: 1.5})


async def test_of_a_step_the_scheduler_hears_what_is_not_tokens_alone(
    tokenizer: Tokenizer,
) -> None:
    (a,) = tokenizer.encode("a")
    async with house(tokenizer) as made:
        for changes in ({}, {"begun": {1: 0.1}}):
            made.mail.post(stepped([1], [RowToken(0, a)], **changes))
        told = await made.scheduler.receive()
        assert isinstance(told, StepOutput)
        assert (told.begun, told.rids) == ({1: 0.1}, [])


async def test_a_client_that_has_gone_is_told_of_behind_all_that_it_asked(
    tokenizer: Tokenizer,
) -> None:
    async with house(tokenizer) as made:
        made.mail.post(prepare(1))
        assert isinstance(await made.scheduler.receive(), Request)
        for message in (Cancel(1), ClientGone(7)):
            made.mail.post(message)
        assert [await made.scheduler.receive() for _ in range(2)] == [Cancel(1), ClientGone(7)]


async def test_what_the_prefix_cache_gave_is_told_beside_the_text(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    async with house(tokenizer) as made:
        made.mail.post(prepare(1))
        await made.scheduler.receive()
        made.mail.post(stepped([1], [RowToken(0, a)], begun={1: 1.5}, cached={1: 32}))
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert deltas.cached == {1: 32}
