"""An executor, and the prefix cache of its runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from hearth.actors.messages import Shutdown, Unpin
from hearth.actors.supervisor_messages import ActorProgress
from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics
from hearth.runtime.request import RequestOptions
from tests.actors.executor_house import House, open_house
from tests.actors.fake_runtime import FakeRuntime
from tests.actors.mail import next_mail
from tests.actors.test_executor import row


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def house(runtime: FakeRuntime) -> Iterator[House]:
    with open_house(runtime) as made:
        yield made


def test_what_came_from_the_prefix_cache_is_told_with_the_first_token(
    house: House, runtime: FakeRuntime
) -> None:
    runtime.cached[5] = 64
    runtime.prefix_metrics = PrefixMetrics(queried=100, reused=64)
    house.offer(row(7, 3), row(8, 3, first=5))
    house.start()
    house.finish(7, 8)
    assert [step.cached for step in house.steps] == [{8: 64}, {}, {}]
    told = next_mail(house.supervisor, 2)
    assert isinstance(told, ActorProgress)
    assert told.metrics
    assert told.metrics.prefix == PrefixMetrics(queried=100, reused=64)


def test_files_that_could_not_be_used_are_in_the_log(house: House, runtime: FakeRuntime) -> None:
    runtime.failures = [HearthError("spill_invalid", "a.page is damaged", "a.page")]
    with capture_logs() as logs:
        house.start()
        next_mail(house.supervisor, 1)
        runtime.failures = [HearthError("spill_invalid", "b.page is damaged", "b.page")]
        house.control.post(Shutdown())
        house.join()
    told = [(one["code"], one["reason"]) for one in logs if one["log_level"] == "warning"]
    assert told == [
        ("spill_invalid", "a.page is damaged"),
        ("spill_invalid", "b.page is damaged"),
    ]


def test_a_client_that_has_gone_keeps_nothing_in_the_prefix_cache(
    house: House, runtime: FakeRuntime
) -> None:
    house.work.post(Unpin(5))
    house.offer(row(7, 1))
    house.start()
    house.finish(7)
    assert runtime.unpinned == [5]


def test_who_may_not_pin_is_refused_alone_and_however_often(
    house: House, runtime: FakeRuntime
) -> None:
    pins = [structs.replace(row(rid)[1], options=RequestOptions(cache="pin")) for rid in range(4)]

    def refuse() -> None:
        if not runtime.rows:
            raise HearthError("cache_full", "too much", "cache")

    runtime.before_admit = refuse
    house.offer(*enumerate(pins))
    house.start()
    house.hear_until("failed", 4)
    assert [(one.rids, one.code) for one in house.failed] == [
        ([rid], "cache_full") for rid in range(4)
    ]
    runtime.before_admit = lambda: None
    house.offer(row(9, 1))
    house.finish(9)
    assert house.failures == []
