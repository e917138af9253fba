from __future__ import annotations

import msgspec
import pytest

from hearth.daemon.control.messages import Trace
from hearth.daemon.observe.tracing.overview import LIMIT, History
from hearth.runtime.errors import HearthError
from hearth.runtime.request import RequestOptions
from tests.daemon.observe.tracing.records import record


@pytest.fixture
def history() -> History:
    kept = History()
    for number in range(1, LIMIT + 6):
        kept.add(record(number, options=RequestOptions(stop=("what a client wrote",))))
    return kept


async def test_the_last_thousand_are_kept(history: History) -> None:
    report = await history.answer(Trace(last=LIMIT))
    numbers = [one.request.partition("-")[2] for one in report.requests]
    assert numbers == [str(number) for number in range(6, LIMIT + 6)]


async def test_the_newest_are_told_where_no_request_is_named(history: History) -> None:
    assert len((await history.answer(Trace())).requests) == 20
    (newest,) = (await history.answer(Trace(last=1))).requests
    assert newest.request == f"b09922ff-{LIMIT + 5}"
    assert (await history.answer(Trace(last=0))).requests == []


async def test_a_request_is_found_by_its_id(history: History) -> None:
    (found,) = (await history.answer(Trace("b09922ff-77"))).requests
    assert found == record(77)


async def test_one_that_is_not_there_is_refused(history: History) -> None:
    with pytest.raises(HearthError) as caught:
        await history.answer(Trace("b09922ff-5"))
    assert (caught.value.code, caught.value.field) == ("unknown_request", "request")


async def test_no_text_of_a_client_is_kept_and_little_memory(history: History) -> None:
    report = msgspec.json.encode(await history.answer(Trace(last=LIMIT)))
    assert b"what a client wrote" not in report
    assert len(report) < LIMIT << 10
