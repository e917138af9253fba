from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from hearth.actors.messages import ExecutorControl, SetAdapter
from hearth.actors.supervisor_messages import AdapterAnswer
from hearth.daemon.adapters import AdapterFolder, AdapterStore, adapters_folder
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


class Harness:
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
    harness = Harness()
    harness.store.executor_ready({})
    harness.events.clear()
    assert await harness.ask(AddAdapter("a", "/s")) == AdapterAdded("a", 4, "home", 9)
    assert harness.events == [SetAdapter("a", "/adapters/a"), ["a"]]


async def test_an_adapter_of_another_base_is_served_with_a_warning() -> None:
    harness = Harness("b")
    with capture_logs() as logs:
        harness.store.executor_ready({"b": ""}, "smol")
        added = await harness.ask(AddAdapter("a", "/s"))
    assert [one["adapter"] for one in logs if one["log_level"] == "warning"] == ["b", "a"]
    assert isinstance(added, AdapterAdded)
    assert "trained for home, this engine was made of smol" in added.note
    listed = await harness.ask(ListAdapters())
    assert isinstance(listed, AdapterList)
    assert [bool(one.note) for one in listed.adapters] == [True, True]


async def test_what_is_removed_is_asked_for_no_more_before_those_end_who_have() -> None:
    harness = Harness("a", "b")
    harness.store.executor_ready({"a": "", "b": ""})
    harness.events.clear()
    assert await harness.ask(RemoveAdapter("a")) == AdapterRemoved("a")
    assert harness.events == [["b"], "a has gone", SetAdapter("a", None)]


async def test_what_the_executor_refuses_is_not_kept() -> None:
    harness = Harness()
    harness.store.executor_ready({})
    harness.react = lambda _: harness.store.answered(
        AdapterAnswer("executor-1", "a", "out_of_memory", "no room for it", "adapters")
    )
    with pytest.raises(HearthError, match="no room") as caught:
        await harness.ask(AddAdapter("a", "/s"))
    assert (caught.value.code, caught.value.field) == ("out_of_memory", "adapters")
    assert harness.folder.kept == harness.store.names == []
    # It may have taken half of it, or will once it has time.
    assert harness.told[-1] == SetAdapter("a", None)


async def test_what_an_executor_dies_of_is_not_kept() -> None:
    harness = Harness()
    harness.store.executor_ready({})
    harness.react = lambda _: harness.store.executor_lost()
    with pytest.raises(HearthError) as caught:
        await harness.ask(AddAdapter("a", "/s"))
    assert caught.value.code == "executor_failed"
    assert harness.folder.kept == harness.store.names == []


@pytest.mark.parametrize("served", [False, True])
async def test_what_nobody_waits_for_any_more_is_not_kept(*, served: bool) -> None:
    harness = Harness(*["a"] * served)
    harness.store.executor_ready(dict.fromkeys(harness.folder.kept, ""))
    # Its folder was taken away by hand.
    harness.folder.kept.clear()
    harness.react = lambda _: None
    with anyio.move_on_after(0.01) as waited:
        await harness.ask(AddAdapter("a", "/s"))
    assert waited.cancelled_caught
    assert harness.folder.kept == harness.store.names == []
    first = SetAdapter("a", None) if served else SetAdapter("a", "/adapters/a")
    assert harness.told == [first, SetAdapter("a", None)]


async def test_without_an_executor_the_next_one_finds_what_is_kept() -> None:
    harness = Harness("a")
    assert harness.store.names == ["a"], "requests wait for the first executor"
    await harness.ask(AddAdapter("b", "/s"))
    await harness.ask(RemoveAdapter("a"))
    assert harness.store.names == ["b"]
    assert not harness.told
    # It read the folder before that.
    harness.store.executor_ready({"a": ""})
    assert harness.told == [SetAdapter("a", None), SetAdapter("b", "/adapters/b")]
    assert harness.store.names == ["b"]


async def test_another_one_of_the_same_name_takes_the_place_of_what_a_starting_executor_found() -> (
    None
):
    harness = Harness("a")
    await harness.ask(RemoveAdapter("a"))
    await harness.ask(AddAdapter("a", "/other"))
    harness.store.executor_ready({"a": ""})
    assert harness.told == [SetAdapter("a", None), SetAdapter("a", "/adapters/a")]
    assert harness.store.names == ["a"]
    harness.told.clear()
    harness.store.executor_ready({"a": ""})
    assert harness.told == []


async def test_adapters_are_checked_for_the_model_whose_weights_are_served() -> None:
    harness = Harness()
    for name, weights in (("a", "first"), ("b", "second")):
        harness.store.executor_ready(dict.fromkeys(harness.folder.kept, ""), weights)
        await harness.ask(AddAdapter(name, "/s"))
    assert harness.folder.models == ["first", "second"]


async def test_one_that_is_not_served_is_listed_with_the_reason() -> None:
    harness = Harness("a", "b")
    harness.store.executor_ready({"a": "", "b": "it was changed"})
    assert harness.store.names == ["a"]
    found = await harness.ask(ListAdapters())
    assert isinstance(found, AdapterList)
    assert [(one.name, one.problem) for one in found.adapters] == [
        ("a", ""),
        ("b", "it was changed"),
    ]
    assert found.folder == "/adapters"


async def test_a_late_refusal_is_noted() -> None:
    harness = Harness("a")
    harness.react = lambda _: None
    harness.store.executor_ready({})
    harness.store.answered(AdapterAnswer("executor-1", "a", "adapter_invalid", "of another base"))
    assert harness.store.names == []
    assert harness.events[-1] == []


@pytest.mark.parametrize("asked", [RemoveAdapter("a"), AddAdapter("a", "/s")])
async def test_one_whose_folder_is_gone_can_be_removed_and_added_again(
    asked: ControlRequest,
) -> None:
    harness = Harness("a")
    harness.store.executor_ready({"a": ""})
    harness.folder.kept.clear()
    harness.events.clear()
    await harness.ask(asked)
    assert harness.events[:3] == [[], "a has gone", SetAdapter("a", None)]
    if isinstance(asked, RemoveAdapter):
        with pytest.raises(HearthError, match="there is no adapter a"):
            await harness.ask(asked)
    else:
        assert harness.events[3:] == [SetAdapter("a", "/adapters/a"), ["a"]]


CONFIG = simulated_config()


@pytest.mark.parametrize(
    ("setting", "environ", "place"),
    [
        ("/k", {"STATE_DIRECTORY": "/s"}, "/k"),
        ("", {"STATE_DIRECTORY": "/s:/t", "XDG_STATE_HOME": "/x"}, "/s/adapters"),
        ("", {"XDG_STATE_HOME": "/x"}, "/x/hearth/adapters"),
        ("", {}, str(Path.home() / ".local/state/hearth/adapters")),
    ],
)
def test_where_adapters_lie(setting: str, environ: dict[str, str], place: str) -> None:
    assert adapters_folder(setting, environ) == Path(place)


def test_a_user_without_a_home_has_no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_kind: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert AdapterFolder(adapters_folder("", {})).names == []
    assert adapters_folder("", {"XDG_STATE_HOME": "/s"}) == Path("/s/hearth/adapters")


def stored(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    (made / "adapter.json").write_text("{")
    return made


def test_only_names_are_adapters(tmp_path: Path) -> None:
    assert AdapterFolder(tmp_path / "none").names == []
    for name in ("b", "a-1.x", ".going", "with space", "x" * 65):
        stored(tmp_path, name)
    (tmp_path / "notes").write_text("no folder")
    assert AdapterFolder(tmp_path).names == ["a-1.x", "b"]


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "-a", "a\0", "ä", "x" * 65, "a\n"])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    for act in (AdapterFolder(tmp_path).of, AdapterFolder(tmp_path).remove):
        with pytest.raises(HearthError) as caught:
            act(name)
        assert (caught.value.code, caught.value.field) == ("invalid_value", "name")


@pytest.mark.parametrize("source", ["", "a", "./a", "/a\0b"])
def test_what_is_no_place_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(HearthError) as caught:
        AdapterFolder(tmp_path).add("a", source, CONFIG)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "folder")


def test_what_is_removed_leaves_nothing(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path)
    stored(tmp_path, "a")
    folder.remove("a")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HearthError) as caught:
        folder.remove("a")
    assert (caught.value.code, caught.value.field) == ("adapter_unknown", "name")


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    stored(tmp_path, "a")
    with pytest.raises(HearthError) as caught:
        AdapterFolder(tmp_path).record("a")
    assert caught.value.code == "adapter_invalid"


def test_an_engine_without_adapters_is_told_how_it_gets_them(tmp_path: Path) -> None:
    plain = msgspec.structs.replace(CONFIG, max_supported_lora_rank=0)
    source = tmp_path / "source"
    source.mkdir()
    (source / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    with pytest.raises(HearthError, match="--max-lora-rank") as caught:
        AdapterFolder(tmp_path / "kept").add("a", str(source), plain)
    assert caught.value.code == "unsupported_option"
