"""Mail that no actor of ours would send: what decodes not, what comes twice, what leads nowhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from hearth.actors.mailbox import Receiver, Sender
from hearth.actors.messages import (
    Accepted,
    Cancel,
    ExecutorLimits,
    ExecutorReady,
    Request,
    Schedule,
    SchedulerMessage,
    StepOutput,
    TokenizerMessage,
)
from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.actors.settings import PolicySettings
from hearth.runtime.errors import HearthError
from hearth.runtime.request import RequestOptions, RowRequest, RowToken
from tests.actors.executor_house import INCARNATION, open_house
from tests.actors.fake_runtime import FakeRuntime
from tests.actors.mail import next_mail
from tests.actors.simulation import LIMITS, ready, schedule_of, submit
from tests.actors.test_scheduler import READY, house, rids


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (TokenizerMessage, ["step_output", 1, 1, 1, [1, 2], [RowToken(0, 5)], 1.0]),
        (TokenizerMessage, ["step_output", 1, 1, 1, [], [RowToken(0, 5)], 1.0]),
        (SchedulerMessage, ["submit", [1, {}, 0, float("nan")], [1]]),
        (SchedulerMessage, ["executor_ready", 1, "w", [0, 50, 100]]),
        (SchedulerMessage, ["executor_ready", 1, "w", [1 << 40, 50, 100]]),
    ],
)
def test_what_would_end_an_actor_is_not_decoded(
    context: zmq.Context[zmq.Socket[bytes]], kind: object, data: list[object]
) -> None:
    with (
        Receiver[object](context, ["inproc://a"], kind, 10) as receiver,
        Sender[object](context, "inproc://a", 10) as sender,
    ):
        sender.post(data)
        sender.post(Cancel(9))
        assert next_mail(receiver, 5) == Cancel(9)
        assert receiver.undecodable == 1


def test_tokens_that_are_nobodys_cannot_be_told() -> None:
    with pytest.raises(ValueError, match="one request"):
        StepOutput(1, 1, 1, [1])


def test_of_two_requests_with_one_number_the_first_gets_the_answers() -> None:
    policy = SchedulerPolicy(PolicySettings(fill_wait_ms=0.0))
    policy.executor_ready(ready(LIMITS), 0.0)
    assert policy.submit(submit(1, prompt=3), 0.0) == [Accepted(1, 3)]
    assert policy.submit(submit(1, prompt=4), 0.0) == []
    wanted = schedule_of(policy.tick(1.0))
    assert [len(row.token_ids) for row in wanted.new.values()] == [3]
    assert policy.submit(submit(1, prompt=5), 1.0) == [], "it is held"
    assert policy.tick(1.5) == []


def test_a_schedule_that_comes_twice_or_late_changes_nothing() -> None:
    options = RequestOptions(max_tokens=2)
    row = RowRequest(token_ids=[1, 2], prompt_length=2, options=options)
    with open_house(FakeRuntime()) as made:
        made.offer((7, row), (7, row))
        made.offer((7, row), (8, row))
        for seq in (1, 2):
            made.work.post(Schedule(INCARNATION, seq, 0, [9], {9: row}))
        made.work.post(Schedule(INCARNATION + 1, 9, 0, [9], {9: row}))
        made.start()
        made.finish(7, 8)
        assert made.placed == [[7, 8]]
        assert made.tokens() == {7: [100, 101], 8: [100, 101]}


@pytest.mark.parametrize("endpoint", ["", "nowhere", "ipc", "carrier://pigeon"])
def test_an_address_that_is_none_is_refused_by_name(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str
) -> None:
    with pytest.raises(HearthError, match="is no address of a mailbox") as caught:
        Sender(context, endpoint, 1)
    assert (caught.value.code, caught.value.field) == ("socket_unusable", "endpoint")


async def test_requests_wait_for_an_executor_that_can_be_reached() -> None:
    async with house() as made:
        made.submit.post(ExecutorReady(1, "nowhere", ExecutorLimits(8, 50, 100)))
        made.submit.post(READY)
        made.submit.post(Request(1, token_ids=[1, 2]))
        assert await made.door.receive() == Accepted(1, 2)
        assert rids(await made.work.receive()) == [1]
