from __future__ import annotations

from collections.abc import Iterator

import pytest

from hearth.actors.messages import SetAdapter
from hearth.runtime.request import RequestOptions, RowRequest
from tests.actors.executor_house import House, open_house
from tests.actors.fake_runtime import FakeRuntime


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def house(runtime: FakeRuntime) -> Iterator[House]:
    with open_house(runtime) as made:
        for name in ("a", "b"):
            made.control.post(SetAdapter(name, f"/adapters/{name}"))
        yield made


def row(rid: int, adapter: str, tokens: int = 3) -> tuple[int, RowRequest]:
    options = RequestOptions(max_tokens=tokens, adapter=adapter)
    return rid, RowRequest(token_ids=[1, 2], prompt_length=2, options=options)


def test_adapters_are_loaded_and_it_is_said(house: House, runtime: FakeRuntime) -> None:
    house.start()
    answers = [house.adapter_answer() for _ in range(2)]
    assert [(one.adapter, one.code) for one in answers] == [("a", ""), ("b", "")]
    assert {name: str(folder) for name, folder in runtime.adapters.items()} == {
        "a": "/adapters/a",
        "b": "/adapters/b",
    }


def test_one_that_cannot_be_loaded_is_told_with_its_field(house: House) -> None:
    house.control.post(SetAdapter("c", ""))
    house.start()
    answers = [house.adapter_answer() for _ in range(3)]
    told = answers[-1]
    assert (told.adapter, told.code, told.field) == ("c", "adapter_invalid", "adapter.json")
    house.offer(row(1, "c"))
    assert house.hear_until("failed").code == "adapter_unknown"


def test_rows_of_another_adapter_wait_until_none_has_a_place(
    house: House, runtime: FakeRuntime
) -> None:
    house.offer(row(1, "a"), row(2, "b", 2), row(3, "a", 2), row(4, ""))
    house.start()
    house.finish(1, 2, 3, 4)
    assert house.placed == [[1, 3], [2], [4]]
    assert runtime.switches == ["a", "b", ""]
    assert {tuple(step.rids) for step in house.steps} == {(1, 3), (1,), (2,), (4,)}


def test_an_unknown_adapter_fails_its_row_alone(house: House, runtime: FakeRuntime) -> None:
    house.offer(row(1, "gone"), row(2, "b"))
    house.start()
    house.finish(1, 2)
    failed = house.failed
    assert [(one.rids, one.code, one.field) for one in failed] == [
        ([1], "adapter_unknown", "adapter")
    ]
    assert runtime.switches == ["b"]


def test_rows_of_an_adapter_that_is_removed_end(house: House, runtime: FakeRuntime) -> None:
    runtime.before_step = lambda step: (
        house.control.post(SetAdapter("a", None)) if step == 2 else None
    )
    house.offer(row(1, "a", 10**6), row(2, "b"), row(3, "a"))
    house.offer(row(4, "b", 1), order=1.0)
    house.start()
    house.hear_until("placed")
    house.finish(1, 2, 3, 4)
    failed = house.failed
    assert [(one.rids, one.code, one.field) for one in failed] == [
        ([1, 3], "adapter_unknown", "adapter")
    ]
    assert runtime.switches == ["a", "b"]
    assert set(runtime.adapters) == {"b"}
    assert [house.adapter_answer().adapter for _ in range(3)] == ["a", "b", "a"]


def test_rows_that_have_no_adapter_go_on_where_one_is_removed(
    house: House, runtime: FakeRuntime
) -> None:
    runtime.before_step = lambda step: (
        house.control.post(SetAdapter("a", None)) if step == 2 else None
    )
    house.offer(row(1, "", 20), row(2, "a"))
    house.start()
    house.finish(1, 2)
    assert [one.rids for one in house.failed] == [[2]]
    assert len(house.tokens()[1]) == 20
