import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from hearth.daemon.cli import cli
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import (
    AdapterAdded,
    AdapterList,
    AdapterRemoved,
    AddAdapter,
    ListAdapters,
    RemoveAdapter,
)
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth_client import AdapterUnknown, Client
from tests.conftest import REFERENCE
from tests.peft_models import write_peft

pytestmark = pytest.mark.slow
SLOW = ("--engine-kind", "simulated", "--step-ms", "10", "--max-batch", "2", "--hold-s", "60")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine that takes adapters."""
    folder = tmp_path_factory.mktemp("engines") / "adaptable"
    options = ExportOptions(capacity=96, max_batch=4, max_lora_rank=4)
    export_model(REFERENCE, folder, options)
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of PEFT: `a` and `b` fit, `large` is of too high a rank."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate((("a", 4), ("b", 2), ("large", 8))):
        write_peft(REFERENCE, folder / name, rank=rank, seed=seed)
    return folder


@pytest.fixture(scope="module")
def shared(engine: Path) -> Iterator[OwnDaemon]:
    with own_daemon(engine) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def slow(engine: Path) -> Iterator[OwnDaemon]:
    """A daemon of slow steps in which nothing is read from an adapter."""
    with own_daemon(engine, SLOW) as daemon:
        yield daemon


def add(daemon: OwnDaemon, name: str, folder: Path) -> AdapterAdded:
    return ask(AddAdapter(name, str(folder)), AdapterAdded, str(daemon.socket))


def listed(daemon: OwnDaemon) -> AdapterList:
    return ask(ListAdapters(), AdapterList, str(daemon.socket))


def text(client: Client, adapter: str = "") -> str:
    return client.generate("to be", max_tokens=24, ignore_eos=True, adapter=adapter).text()


def test_adapters_are_added_and_removed_while_the_daemon_serves(
    shared: OwnDaemon, adapters: Path
) -> None:
    with Client(shared.socket) as client:
        plain = text(client)
        added = add(shared, "first", adapters / "a")
        assert (added.name, added.rank, added.base) == ("first", 4, REFERENCE.name)
        add(shared, "second", adapters / "b")
        replies = {name: text(client, name) for name in ("first", "second", "")}
        assert len(set(replies.values())) == 3
        assert replies[""] == plain
        found = listed(shared)
        assert [(one.name, one.rank, one.problem) for one in found.adapters] == [
            ("first", 4, ""),
            ("second", 2, ""),
        ]
        assert found.max_rank == 4
        assert client.status().adapters == ["first", "second"]
        assert {one.stat().st_mode & 0o777 for one in Path(found.folder).rglob("*.*")} == {0o600}

        executor = shared.executor
        assert executor is not None
        os.kill(executor, signal.SIGKILL)
        # The next one finds them again.
        assert text(client, "second") == replies["second"]
        assert shared.executor != executor

        ask(RemoveAdapter("first"), AdapterRemoved, str(shared.socket))
        with pytest.raises(AdapterUnknown, match="there are second") as caught:
            text(client, "first")
        assert caught.value.field == "adapter"
        assert client.status().adapters == ["second"]
        ask(RemoveAdapter("second"), AdapterRemoved, str(shared.socket))
        assert text(client) == plain
    with Client(shared.socket) as client:
        assert client.connect().adapters == []


@pytest.mark.parametrize(
    ("name", "folder", "at_fault"),
    [
        ("large", "large", ("adapter_invalid", "r")),
        ("none", "none", ("adapter_invalid", "adapter_config.json")),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    shared: OwnDaemon, adapters: Path, name: str, folder: str, at_fault: tuple[str, str]
) -> None:
    before = listed(shared)
    with pytest.raises(HearthError) as caught:
        add(shared, name, adapters / folder)
    assert (caught.value.code, caught.value.field) == at_fault
    assert listed(shared) == before


def test_a_name_is_taken_once_and_an_unknown_one_cannot_be_removed(
    shared: OwnDaemon, adapters: Path
) -> None:
    add(shared, "twice", adapters / "a")
    with pytest.raises(HearthError) as caught:
        add(shared, "twice", adapters / "b")
    assert (caught.value.code, caught.value.field) == ("invalid_value", "name")
    ask(RemoveAdapter("twice"), AdapterRemoved, str(shared.socket))
    with pytest.raises(HearthError) as caught:
        ask(RemoveAdapter("twice"), AdapterRemoved, str(shared.socket))
    assert (caught.value.code, caught.value.field) == ("adapter_unknown", "name")


def test_the_commands(shared: OwnDaemon, adapters: Path) -> None:
    socket = ["--socket", str(shared.socket)]

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["adapter", *arguments, *socket])
        assert result.exit_code == 0, result.output
        return str(result.output)

    assert run("add", "mine", str(adapters / "a")).startswith("added mine: rank 4, ")
    assert run("list").split()[:3] == ["mine", "rank", "4,"]
    assert '"name":"mine"' in run("list", "--json")
    assert run("remove", "mine") == "removed mine\n"
    assert "there is no adapter in " in run("list")


def test_who_runs_with_an_adapter_that_is_removed_ends(slow: OwnDaemon, adapters: Path) -> None:
    add(slow, "a", adapters / "a")
    with Client(slow.socket) as client:
        running = client.generate("a", max_tokens=60, ignore_eos=True, adapter="a")
        waiting = client.generate("b", max_tokens=5, ignore_eos=True)
        next(iter(running))
        ask(RemoveAdapter("a"), AdapterRemoved, str(slow.socket))
        with pytest.raises(AdapterUnknown):
            running.text()
        assert waiting.done is None
        waiting.text()
        assert waiting.done is not None
