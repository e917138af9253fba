from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from hearth.actors.messages import ExecutorControl, SetAdapter
from hearth.actors.supervisor_messages import AdapterAnswer
from hearth.daemon.adapters.store import AdapterFolder, AdapterStore
from hearth.daemon.control.messages import (
    AdapterAdded,
    AdapterList,
    AdapterRemoved,
    AddAdapter,
    ControlAnswer,
    ControlRequest,
    ListAdapters,
    RemoveAdapter,
)
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.lora.stored import AdapterRecord

RECORD = AdapterRecord(rank=4, base="home", source="/s", shapes="", bytes=9, sha256="")


class StandIn(AdapterFolder):
    """A folder in memory."""

    def __init__(self) -> None:
        super().__init__(Path("/adapters"))
        self.kept: list[str] = []
        self.models: list[str] = []

    @property
    def names(self) -> list[str]:
        return sorted(self.kept)

    def add(self, name: str, source: str, config: LLMEngineRunnerConfig) -> AdapterRecord:  # noqa: ARG002 - AdapterFolder's signature
        self.kept.append(name)
        self.models.append(config.model_name)
        return RECORD

    def remove(self, name: str) -> None:
        if name not in self.kept:
            raise HearthError("adapter_unknown", f"there is no adapter {name}", "name")
        self.kept.remove(name)

    def record(self, name: str) -> AdapterRecord:  # noqa: ARG002 - likewise
        return RECORD


class House:
    """A store and its neighbours; `react` is what the executor does with what it is told."""

    def __init__(self, *kept: str) -> None:
        self.folder = StandIn()
        self.folder.kept += kept
        self.told: list[ExecutorControl] = []
        self.events: list[object] = []
        self.react: Callable[[ExecutorControl], None] = self.obey
        self.store = AdapterStore(
            self.folder,
            simulated_config(),
            tell=self.tell,
            gone=self.gone,
            served=lambda: self.events.append(self.store.names),
        )

    def tell(self, message: ExecutorControl) -> bool:
        self.told.append(message)
        self.events.append(message)
        self.react(message)
        return True

    def obey(self, message: ExecutorControl) -> None:
        assert isinstance(message, SetAdapter)
        self.store.answered(AdapterAnswer("executor-1", message.name))

    async def gone(self, name: str) -> None:
        self.events.append(f"{name} has gone")

    async def ask(self, request: ControlRequest) -> ControlAnswer:
        with anyio.fail_after(5):
            return await self.store.handlers[type(request)](request)


async def test_what_is_added_is_served_once_the_executor_has_it() -> None:
    house = House()
    house.store.executor_ready({})
    house.events.clear()
    assert await house.ask(AddAdapter("a", "/s")) == AdapterAdded("a", 4, "home", 9)
    assert house.events == [SetAdapter("a", "/adapters/a"), ["a"]]


async def test_an_adapter_of_another_base_is_served_with_a_warning() -> None:
    house = House("b")
    with capture_logs() as logs:
        house.store.executor_ready({"b": ""}, "smol")
        added = await house.ask(AddAdapter("a", "/s"))
    assert [one["adapter"] for one in logs if one["log_level"] == "warning"] == ["b", "a"]
    assert isinstance(added, AdapterAdded)
    assert "trained for home, this engine was made of smol" in added.note
    listed = await house.ask(ListAdapters())
    assert isinstance(listed, AdapterList)
    assert [bool(one.note) for one in listed.adapters] == [True, True]


async def test_what_is_removed_is_asked_for_no_more_before_those_end_who_have() -> None:
    house = House("a", "b")
    house.store.executor_ready({"a": "", "b": ""})
    house.events.clear()
    assert await house.ask(RemoveAdapter("a")) == AdapterRemoved("a")
    assert house.events == [["b"], "a has gone", SetAdapter("a", None)]


async def test_what_the_executor_refuses_is_not_kept() -> None:
    house = House()
    house.store.executor_ready({})
    house.react = lambda _: house.store.answered(
        AdapterAnswer("executor-1", "a", "out_of_memory", "no room for it", "adapters")
    )
    with pytest.raises(HearthError, match="no room") as caught:
        await house.ask(AddAdapter("a", "/s"))
    assert (caught.value.code, caught.value.field) == ("out_of_memory", "adapters")
    assert house.folder.kept == house.store.names == []
    # It may have taken half of it, or will once it has time.
    assert house.told[-1] == SetAdapter("a", None)


async def test_what_an_executor_dies_of_is_not_kept() -> None:
    house = House()
    house.store.executor_ready({})
    house.react = lambda _: house.store.executor_lost()
    with pytest.raises(HearthError) as caught:
        await house.ask(AddAdapter("a", "/s"))
    assert caught.value.code == "executor_failed"
    assert house.folder.kept == house.store.names == []


@pytest.mark.parametrize("served", [False, True])
async def test_what_nobody_waits_for_any_more_is_not_kept(*, served: bool) -> None:
    house = House(*["a"] * served)
    house.store.executor_ready(dict.fromkeys(house.folder.kept, ""))
    # Its folder was taken away by hand.
    house.folder.kept.clear()
    house.react = lambda _: None
    with anyio.move_on_after(0.01) as waited:
        await house.ask(AddAdapter("a", "/s"))
    assert waited.cancelled_caught
    assert house.folder.kept == house.store.names == []
    first = SetAdapter("a", None) if served else SetAdapter("a", "/adapters/a")
    assert house.told == [first, SetAdapter("a", None)]


async def test_without_an_executor_the_next_one_finds_what_is_kept() -> None:
    house = House("a")
    assert house.store.names == ["a"], "requests wait for the first executor"
    await house.ask(AddAdapter("b", "/s"))
    await house.ask(RemoveAdapter("a"))
    assert house.store.names == ["b"]
    assert not house.told
    # It read the folder before that.
    house.store.executor_ready({"a": ""})
    assert house.told == [SetAdapter("a", None), SetAdapter("b", "/adapters/b")]
    assert house.store.names == ["b"]


async def test_another_one_of_the_same_name_takes_the_place_of_what_a_starting_executor_found() -> (
    None
):
    house = House("a")
    await house.ask(RemoveAdapter("a"))
    await house.ask(AddAdapter("a", "/other"))
    house.store.executor_ready({"a": ""})
    assert house.told == [SetAdapter("a", None), SetAdapter("a", "/adapters/a")]
    assert house.store.names == ["a"]
    house.told.clear()
    house.store.executor_ready({"a": ""})
    assert house.told == []


async def test_adapters_are_checked_for_the_model_whose_weights_are_served() -> None:
    house = House()
    for name, weights in (("a", "first"), ("b", "second")):
        house.store.executor_ready(dict.fromkeys(house.folder.kept, ""), weights)
        await house.ask(AddAdapter(name, "/s"))
    assert house.folder.models == ["first", "second"]


async def test_one_that_is_not_served_is_listed_with_the_reason() -> None:
    house = House("a", "b")
    house.store.executor_ready({"a": "", "b": "it was changed"})
    assert house.store.names == ["a"]
    found = await house.ask(ListAdapters())
    assert isinstance(found, AdapterList)
    assert [(one.name, one.problem) for one in found.adapters] == [
        ("a", ""),
        ("b", "it was changed"),
    ]
    assert found.folder == "/adapters"


async def test_a_late_refusal_is_noted() -> None:
    house = House("a")
    house.react = lambda _: None
    house.store.executor_ready({})
    house.store.answered(AdapterAnswer("executor-1", "a", "adapter_invalid", "of another base"))
    assert house.store.names == []
    assert house.events[-1] == []


@pytest.mark.parametrize("asked", [RemoveAdapter("a"), AddAdapter("a", "/s")])
async def test_one_whose_folder_is_gone_can_be_removed_and_added_again(
    asked: ControlRequest,
) -> None:
    house = House("a")
    house.store.executor_ready({"a": ""})
    house.folder.kept.clear()
    house.events.clear()
    await house.ask(asked)
    assert house.events[:3] == [[], "a has gone", SetAdapter("a", None)]
    if isinstance(asked, RemoveAdapter):
        with pytest.raises(HearthError, match="there is no adapter a"):
            await house.ask(asked)
    else:
        assert house.events[3:] == [SetAdapter("a", "/adapters/a"), ["a"]]
