from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import AsyncMock, patch

import anyio
import anyio.to_thread
import pytest
import zmq
from msgspec import structs
from structlog.testing import capture_logs

from hearth.actors.mailbox import MailboxFull, Receiver, Sender
from hearth.actors.messages import (
    Cancel,
    ClientGone,
    Convert,
    Converted,
    Deltas,
    DoorMessage,
    ExecutorLost,
    Failed,
    Request,
    SchedulerControl,
    SchedulerMessage,
    StepOutput,
    TokenizerMessage,
)
from hearth.actors.tokenizer import actor as module
from hearth.actors.tokenizer.actor import TokenizerActor
from hearth.actors.tokenizer.prompt_images import PromptImages
from hearth.runtime.request import RequestOptions, RowRound, RowToken
from hearth.runtime.text.conversation import Conversation, Turn
from hearth.runtime.text.tokenizer import Tokenizer
from tests.actors.scheduler.simulation import LIMITS, output, ready
from tests.actors.tokenizer.slow_tokenizer import Gate, SlowTokenizer
from tests.runtime.text.folders import byte_level, open_tokenizer

READY = ready(LIMITS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("engine"), byte_level())


@dataclass
class Harness:
    """The neighbours of one tokenizer, each end owned by the test."""

    mail: Sender[Any]
    scheduler: Receiver[SchedulerMessage]
    control: Receiver[SchedulerControl]
    door: Receiver[DoorMessage]
    actor: TokenizerActor


@asynccontextmanager
async def harness(
    tokenizer: Any, *, gate: bool = False, images: PromptImages | None = None
) -> AsyncIterator[Harness]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def connect(endpoint: str) -> Sender[Any]:
        return Sender(context, endpoint, 100)

    inbox: Receiver[TokenizerMessage] = Receiver(context, ["inproc://t"], TokenizerMessage, 100)
    scheduler: Receiver[SchedulerMessage] = Receiver(context, ["inproc://s"], SchedulerMessage, 100)
    control: Receiver[SchedulerControl] = Receiver(context, ["inproc://c"], SchedulerControl, 100)
    door: Receiver[DoorMessage] = Receiver(context, ["inproc://d"], DoorMessage, 100)
    to_door: Any = Gate(connect("inproc://d")) if gate else connect("inproc://d")
    actor = TokenizerActor(
        inbox=inbox,
        to_scheduler=connect("inproc://s"),
        to_scheduler_control=connect("inproc://c"),
        to_door=to_door,
        tokenizer=tokenizer,
        ends=(),
        images=images,
    )
    made = Harness(connect("inproc://t"), scheduler, control, door, actor)
    try:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(actor.run)
                made.mail.post(READY)
                assert await scheduler.receive() == READY
                yield made
                tasks.cancel_scope.cancel()
    finally:
        for mailbox in (made.mail, scheduler, control, door):
            mailbox.close()
        context.term()


def prepare(rid: int, prompt: str = "the lamp", stop: tuple[str, ...] = ()) -> Request:
    return structs.replace(asked(rid, stop), prompt=prompt)


def asked(rid: int, stop: tuple[str, ...] = ()) -> Request:
    return Request(rid, RequestOptions(max_tokens=16, seed=3, stop=stop), 2, 5.0)


def step(tokens: list[tuple[int, int]], **fields: Any) -> StepOutput:
    return stepped([RowToken(rid, token, **fields) for rid, token in tokens])


def stepped(tokens: list[RowToken], **more: Any) -> StepOutput:
    ended = [one.row for one in tokens if one.finish or one.error]
    return output(tokens=tokens, ended=1.5, finished=ended, **more)


async def test_a_prompt_is_submitted_with_its_settings(tokenizer: Tokenizer) -> None:
    async with harness(tokenizer) as made:
        sent = time.monotonic()
        made.mail.post(prepare(1))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        ids, encoded = tokenizer.encode("the lamp"), submit.encoded
        assert submit == structs.replace(asked(1), token_ids=ids, encoded=encoded)
        assert sent < encoded <= time.monotonic()


async def test_turns_get_the_chat_template(tokenizer: Tokenizer) -> None:
    async with harness(tokenizer) as made:
        made.mail.post(Request(1, chat=Conversation([Turn("user", "hi")])))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert submit.token_ids == tokenizer.encode_pairs([("user", "hi")])


async def test_a_step_becomes_one_message_for_all_its_rows(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    async with harness(tokenizer) as made:
        for rid in (1, 2):
            made.mail.post(prepare(rid))
            await made.scheduler.receive()
        made.mail.post(step([(1, a), (7, b), (2, b)]))
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert [(row.rid, row.text, row.tokens) for row in deltas.rows] == [
            (1, "a", [a]),
            (2, "b", [b]),
        ]
        assert deltas.ended == 1.5
        assert deltas.detokenize_s > 0


def round_of(rid: int, ids: list[int], *, finish: Any = None, logprob: Any = None) -> StepOutput:
    tokens = [RowToken(rid, token, logprob) for token in ids[:-1]]
    tokens.append(RowToken(rid, ids[-1], logprob, finish=finish))
    return stepped(tokens, rounds=[RowRound(rid, 9, len(ids))])


async def test_the_tokens_of_a_round_are_one_delta(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the lamp")
    (fox, *rest) = tokenizer.encode("🦊")
    async with harness(tokenizer) as made:
        made.mail.post(prepare(1))
        await made.scheduler.receive()
        made.mail.post(round_of(1, [*ids, fox], logprob=-0.5))
        made.mail.post(round_of(1, rest, finish="length"))
        first, second = await made.door.receive(), await made.door.receive()
        assert isinstance(first, Deltas)
        assert isinstance(second, Deltas)
        (one,), (two,) = first.rows, second.rows
        assert (one.text, one.tokens, one.finish) == ("the lamp", [*ids, fox], None)
        assert [token.token_id for token in one.logprobs] == one.tokens
        assert (two.text, two.tokens, two.finish) == ("🦊", rest, "length")
        assert first.rounds == [RowRound(1, 9, len(ids) + 1)]


async def test_what_a_round_gave_behind_a_stop_string_is_dropped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abcd")
    async with harness(tokenizer) as made:
        made.mail.post(prepare(1, stop=("b",)))
        await made.scheduler.receive()
        made.mail.post(round_of(1, ids))
        assert await made.control.receive() == Cancel(1)
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        (row,) = deltas.rows
        assert (row.text, row.tokens, row.finish) == ("a", ids[:2], "stop")
        made.mail.post(Convert(2, text="a"))
        assert await made.door.receive() == Converted(2, tokens=ids[:1])


async def test_text_of_the_step_in_which_a_row_fails_comes_before_the_failure(
    tokenizer: Tokenizer,
) -> None:
    (a,) = tokenizer.encode("a")
    async with harness(tokenizer) as made:
        made.mail.post(prepare(1))
        await made.scheduler.receive()
        made.mail.post(stepped([RowToken(1, a), RowToken(1, -1, error="non_finite")]))
        deltas, failed = await made.door.receive(), await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert deltas.rows[0].text == "a"
        assert isinstance(failed, Failed)


async def test_a_stop_string_cancels_the_row_at_the_scheduler(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    async with harness(tokenizer) as made:
        made.mail.post(prepare(1, stop=("b",)))
        await made.scheduler.receive()
        made.mail.post(step([(1, a)]))
        made.mail.post(step([(1, b)]))
        assert await made.control.receive() == Cancel(1)
        rows = []
        for _ in range(2):
            deltas = await made.door.receive()
            assert isinstance(deltas, Deltas)
            rows += [(row.text, row.finish) for row in deltas.rows]
        assert rows == [("a", None), ("", "stop")]


async def test_a_row_that_ends_by_itself_is_not_cancelled(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    async with harness(tokenizer) as made:
        made.mail.post(prepare(1, stop=("a",)))
        await made.scheduler.receive()
        made.mail.post(step([(1, a)], finish="length"))
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert deltas.rows[0].finish == "stop"
        assert made.control.receive_nowait() is None


async def test_failures_of_rows_reach_the_door(tokenizer: Tokenizer) -> None:
    async with harness(tokenizer) as made:
        made.mail.post(prepare(1))
        await made.scheduler.receive()
        made.mail.post(step([(1, -1)], error="non_finite"))
        failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code) == ([1], "non_finite")
        refused = Failed([4, 5], "queue_full", "too many", "max_tokens")
        made.mail.post(refused)
        assert await made.door.receive() == refused
        # The scheduler has said so itself.
        placed = output(placed=[9])
        made.mail.post(placed)
        ended = await made.scheduler.receive()
        assert isinstance(ended, StepOutput)
        assert (ended.finished, ended.tokens) == ([1], [])
        assert await made.scheduler.receive() == placed


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (prepare(1, ""), "prompt_empty", "prompt"),
        (prepare(1, stop=("",)), "invalid_value", "stop"),
        (
            Request(1, chat=Conversation([Turn("user", "x")], variables={"unread": 1})),
            "unsupported_option",
            "template.unread",
        ),
        (Convert(1, tokens=[4, 400]), "invalid_value", "tokens"),
    ],
)
async def test_what_cannot_be_encoded_fails_with_its_field(
    tokenizer: Tokenizer, request_: Request | Convert, code: str, field: str
) -> None:
    async with harness(tokenizer) as made:
        made.mail.post(request_)
        failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code, failed.field) == ([1], code, field)
        # The actor goes on, and has kept nothing of the request.
        made.mail.post(step([(1, 5)]))
        made.mail.post(Convert(2, text="a"))
        assert await made.door.receive() == Converted(2, tokens=tokenizer.encode("a"))


async def test_conversions(tokenizer: Tokenizer) -> None:
    turns = [Turn("user", "hi")]
    ids = tokenizer.encode_pairs([("user", "hi")])
    async with harness(tokenizer) as made:
        made.mail.post(Convert(1, chat=Conversation(turns)))
        assert await made.door.receive() == Converted(1, tokens=ids)
        made.mail.post(Convert(2, tokens=ids))
        text = tokenizer.decode(ids, skip_special=False)
        assert await made.door.receive() == Converted(2, text=text)


async def test_too_many_waiting_requests_are_refused_and_a_cancel_makes_room(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTAKE_LIMIT", 1)
    slow = SlowTokenizer(tokenizer)
    async with harness(slow) as made:
        made.mail.post(prepare(1, "the lamp " * 200))
        assert await anyio.to_thread.run_sync(slow.started.wait, 5)
        for rid in (2, 3):
            made.mail.post(prepare(rid, "the lamp " * 200))
        made.mail.post(Cancel(2))
        made.mail.post(prepare(4))
        failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code) == ([3], "queue_full")
        slow.go.set()
        submits = [await made.scheduler.receive() for _ in range(2)]
        assert [one.rid for one in submits if isinstance(one, Request)] == [1, 4]


async def test_a_fault_in_one_request_ends_nothing_else(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[int]:
        raise ZeroDivisionError

    async with harness(tokenizer) as made:
        with capture_logs() as logs, monkeypatch.context() as patch:
            patch.setattr(tokenizer, "encode", broken)
            made.mail.post(prepare(1))
            failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code) == ([1], "internal")
        assert logs[0]["rid"] == 1
        made.mail.post(prepare(2))
        assert isinstance(await made.scheduler.receive(), Request)


async def test_a_fault_of_ours_in_a_step_does_not_end_the_actor(tokenizer: Tokenizer) -> None:
    async with harness(tokenizer) as made:
        with capture_logs() as logs, patch.object(made.actor, "_step", None):
            made.mail.post(step([(1, 5)]))
            made.mail.post(prepare(2))
            assert isinstance(await made.scheduler.receive(), Request)
        assert logs[0]["kind"] == "StepOutput"


async def test_text_that_the_door_did_not_take_fails_its_request(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    async with harness(tokenizer, gate=True) as made:
        gate: Any = made.actor._to_door
        made.mail.post(prepare(1))
        await made.scheduler.receive()
        gate.shut = True
        with capture_logs() as logs:
            made.mail.post(step([(1, a)]))
            assert await made.control.receive() == Cancel(1)
        assert logs[0]["dropped"] == "Deltas"
        assert made.actor.lost == 1
        gate.shut = False
        made.mail.post(step([(1, a)]))
        made.mail.post(Convert(2, text="a"))
        failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code) == ([1], "internal")
        assert await made.door.receive() == Converted(2, tokens=[a])


async def test_what_is_cancelled_while_it_is_encoded_is_not_submitted_and_steps_never_wait(
    tokenizer: Tokenizer,
) -> None:
    slow = SlowTokenizer(tokenizer)
    (a,) = tokenizer.encode("a")
    async with harness(slow) as made:
        slow.go.set()
        made.mail.post(prepare(1))
        await made.scheduler.receive()
        slow.go.clear()
        slow.started.clear()
        made.mail.post(prepare(2, "the lamp " * 200))
        assert await anyio.to_thread.run_sync(slow.started.wait, 5)
        made.mail.post(Cancel(2))
        made.mail.post(step([(1, a)]))
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert slow.thread != threading.get_ident()
        slow.go.set()
        made.mail.post(prepare(3))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert submit.rid == 3
        assert len(made.actor._streams) == 2


async def test_a_cancel_behind_its_request_stays_behind_it(tokenizer: Tokenizer) -> None:
    async with harness(tokenizer) as made:
        made.mail.post(prepare(1))
        assert isinstance(await made.scheduler.receive(), Request)
        made.mail.post(Cancel(1))
        assert await made.scheduler.receive() == Cancel(1)
        assert len(made.actor._streams) == 0


if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


async def test_a_row_s_return_is_passed_on_once_its_tokens_are(tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("a")
    async with harness(tokenizer) as made:
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
        async with harness(tokenizer) as made:
            full = AsyncMock(side_effect=MailboxFull("inproc://s"))
            made.actor._to_scheduler.send = full  # type: ignore[method-assign] # a full mailbox
            made.mail.post(message)
            await anyio.sleep(5)

    with pytest.raises(ExceptionGroup) as raised:
        await run()
    assert "MailboxFull" in repr(raised.value)


async def test_the_ends_of_rows_are_passed_on_behind_their_tokens(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    async with harness(tokenizer) as made:
        for rid in (1, 2):
            made.mail.post(prepare(rid))
            await made.scheduler.receive()
        made.mail.post(step([(1, a), (2, a)]))
        tokens = [
            RowToken(1, a, finish="length"),
            RowToken(2, a),
            RowToken(3, -1, error="internal"),
        ]
        ended = stepped(tokens)
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
    async with harness(tokenizer) as made:
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
        first = output(2, tokens=[RowToken(2, a)], ended=2.0, slot_times={2: 1.5})
        made.mail.post(first)
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert ([row.rid for row in deltas.rows], deltas.slot_times) == ([2], {2: 1.5})


async def test_of_a_step_the_scheduler_hears_what_is_not_tokens_alone(
    tokenizer: Tokenizer,
) -> None:
    (a,) = tokenizer.encode("a")
    async with harness(tokenizer) as made:
        for changes in ({}, {"slot_times": {1: 0.1}}):
            made.mail.post(stepped([RowToken(1, a)], **changes))
        told = await made.scheduler.receive()
        assert isinstance(told, StepOutput)
        assert (told.slot_times, told.tokens) == ({1: 0.1}, [])


async def test_a_client_that_has_gone_is_told_of_behind_all_that_it_asked(
    tokenizer: Tokenizer,
) -> None:
    async with harness(tokenizer) as made:
        made.mail.post(prepare(1))
        assert isinstance(await made.scheduler.receive(), Request)
        for message in (Cancel(1), ClientGone(7)):
            made.mail.post(message)
        assert [await made.scheduler.receive() for _ in range(2)] == [Cancel(1), ClientGone(7)]


async def test_what_the_prefix_cache_gave_is_told_beside_the_text(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    async with harness(tokenizer) as made:
        made.mail.post(prepare(1))
        await made.scheduler.receive()
        made.mail.post(stepped([RowToken(1, a)], slot_times={1: 1.5}, cached={1: 32}))
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert deltas.cached == {1: 32}


async def test_a_prompt_far_beyond_the_executors_limit_is_refused_before_it_is_encoded(
    tokenizer: Tokenizer,
) -> None:
    long = "a " * 20 * LIMITS.max_prompt_tokens
    chat = Conversation([Turn("user", long)])
    async with harness(tokenizer) as made:
        for asked_for in (prepare(1, long), Request(2, chat=chat)):
            made.mail.post(asked_for)
            failed = await made.door.receive()
            assert isinstance(failed, Failed)
            assert (failed.code, failed.field) == ("prompt_too_long", "prompt")
        # Who asks for the tokens gets them.
        made.mail.post(Convert(3, text=long))
        converted = await made.door.receive()
        assert isinstance(converted, Converted)
        assert converted.tokens == tokenizer.encode(long)


async def test_the_text_of_each_of_several_replies_is_open_from_the_start(
    tokenizer: Tokenizer,
) -> None:
    a, b = tokenizer.encode("ab")
    async with harness(tokenizer) as made:
        made.mail.post(structs.replace(prepare(1), siblings=[2, 3]))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert (submit.rid, submit.siblings) == (1, [2, 3])
        made.mail.post(step([(1, a), (2, b), (3, a)]))
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert [(row.rid, row.text) for row in deltas.rows] == [(1, "a"), (2, "b"), (3, "a")]
        # Refused by the scheduler as one.
        made.mail.post(Failed([1, 2, 3], "queue_full", "full"))
        assert isinstance(await made.door.receive(), Failed)
        assert len(made.actor._streams) == 0
