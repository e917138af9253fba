"""A whole daemon that is given other weights while it serves."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Reload, Reloaded
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.export import export_weights
from hearth_client import Client
from hearth_client.errors import ServiceFailed
from hearth_client.protocol import StatusReport
from tests.conftest import REFERENCE
from tests.runtime.weights.external_models import needs_other_weights, tuned


@pytest.fixture
def home(tmp_path: Path, short_folder: Path) -> Home:
    engine, weights = (short_folder / name for name in ("engine", "weights"))
    options = ExportOptions(capacity=96, max_batch=2, external_weights=True)
    export_model(REFERENCE, engine, options)
    export_weights(tuned(REFERENCE, tmp_path / "other"), engine, weights)
    return Home(engine, weights, short_folder / "served")


class Home(NamedTuple):
    """An engine, weights of another fine-tune for it, and where those lie that are served."""

    engine: Path
    other: Path
    path: Path

    @contextmanager
    def serves(self, *flags: str) -> Iterator[tuple[OwnDaemon, Client]]:
        shutil.copy(self.engine / "weights.safetensors", self.path)
        given = ["--weights", str(self.path), "--threads", "1", "--speculation", "off", *flags]
        with own_daemon(self.engine, given) as daemon, Client(daemon.socket) as client:
            yield daemon, client

    def mv(self) -> None:
        """Exchange the file as it has to be done."""
        fresh = self.path.with_name("fresh")
        shutil.copy(self.other, fresh)
        fresh.rename(self.path)


def reply(client: Client) -> str:
    return client.generate("a fine", max_tokens=8, ignore_eos=True).text()


def wait_for(client: Client, seen: Callable[[StatusReport], bool]) -> StatusReport:
    deadline = time.monotonic() + 30
    while not seen(report := client.status()):
        assert time.monotonic() < deadline, report
        time.sleep(0.05)
    return report


@needs_other_weights
@pytest.mark.slow
def test_a_file_that_is_written_over_is_served_as_it_is_then(home: Home) -> None:
    with home.serves() as (daemon, client):
        first = reply(client)
        # The same inode, as `cp other served` does.
        home.path.write_bytes(home.other.read_bytes())
        report = wait_for(client, lambda report: report.state != "ready")
        assert str(home.path) in report.reason
        # Who comes meanwhile waits.
        second = reply(client)
        assert client.status().engine["weights"] == "other"
        assert second != first
        assert second == reply(client)
        log = daemon.log()
        assert "is changed in place" in log or "is cut short" in log
        assert "other weights are served than before" in log


@needs_other_weights
@pytest.mark.slow
def test_nothing_is_taken_in_from_a_file_that_is_cut_short_until_it_is_whole(home: Home) -> None:
    with home.serves("--restart-limit", "0") as (daemon, client):
        first = reply(client)
        whole = home.path.read_bytes()
        os.truncate(home.path, len(whole) // 2)
        report = wait_for(client, lambda report: "instead of" in report.reason)
        assert report.state == "starting"
        assert str(home.path) in report.reason
        with pytest.raises(ServiceFailed) as caught:
            reply(client)
        assert caught.value.code == "weights_invalid"
        assert str(home.path) in str(caught.value)
        home.path.write_bytes(whole)
        wait_for(client, lambda report: report.state == "ready")
        assert reply(client) == first
        assert daemon.runs


@needs_other_weights
@pytest.mark.slow
def test_a_file_that_was_moved_onto_the_path_is_served_from_a_reload_on(home: Home) -> None:
    with home.serves() as (daemon, client):
        first = reply(client)
        assert ask(Reload(), Reloaded, str(daemon.socket)) == Reloaded([], [])
        home.mv()
        assert reply(client) == first
        assert ask(Reload(), Reloaded, str(daemon.socket)) == Reloaded(["weights"], [])
        assert reply(client) != first
        assert client.status().engine["weights"] == "other"
        home.path.with_name("fresh").write_bytes(home.path.read_bytes()[:-1])
        home.path.with_name("fresh").rename(home.path)
        with pytest.raises(HearthError) as caught:
            ask(Reload(), Reloaded, str(daemon.socket))
        assert caught.value.code == "weights_invalid"


@pytest.mark.slow
def test_an_engine_with_other_words_is_refused_until_a_restart(
    tmp_path: Path, short_folder: Path
) -> None:
    names = ("engine", "before", "after", "numbers")
    engine, before, after, numbers = (short_folder / name for name in names)
    options = ExportOptions(capacity=96, max_batch=2)
    export_model(REFERENCE, engine, options)
    model = tuned(REFERENCE, tmp_path / "model")
    export_model(model, numbers, options)
    template = model / "chat_template.jinja"
    template.write_text(f"{template.read_text()} ")
    export_model(model, after, options)
    flags = ["--threads", "1", "--speculation", "off"]
    with own_daemon(engine, flags) as daemon, Client(daemon.socket) as client:
        first = reply(client)
        engine.rename(before)
        after.rename(engine)
        with pytest.raises(HearthError) as caught:
            ask(Reload(), Reloaded, str(daemon.socket))
        assert caught.value.code == "engine_incompatible"
        assert reply(client) == first
        assert daemon.executor is not None
        os.kill(daemon.executor, signal.SIGKILL)
        wait_for(client, lambda report: "another engine" in report.reason)
        with pytest.raises(ServiceFailed):
            reply(client)
        engine.rename(after)
        before.rename(engine)
        wait_for(client, lambda report: report.state == "ready")
        assert reply(client) == first
        engine.rename(before)
        numbers.rename(engine)
        assert ask(Reload(), Reloaded, str(daemon.socket)) == Reloaded(["weights"], [])
        assert reply(client) != first


@needs_other_weights
@pytest.mark.slow
def test_other_weights_at_the_start_of_an_executor_are_said(home: Home) -> None:
    with home.serves() as (daemon, client):
        before = client.status().engine["weights_sha256"]
        home.mv()
        assert daemon.executor is not None
        os.kill(daemon.executor, signal.SIGKILL)
        wait_for(client, lambda report: report.engine.get("weights") == "other")
        now = client.status().engine["weights_sha256"]
        said = [line for line in daemon.log().splitlines() if "other weights are served" in line]
        assert [str(before) in line and str(now) in line for line in said] == [True]


@needs_other_weights
@pytest.mark.slow
def test_a_fine_tune_is_served_in_mid_service(tmp_path: Path, short_folder: Path) -> None:
    engine, weights, config = (short_folder / name for name in ("engine", "weights", "hearth.toml"))
    options = ExportOptions(capacity=96, max_batch=2, external_weights=True)
    export_model(REFERENCE, engine, options)
    export_weights(tuned(REFERENCE, tmp_path / "other"), engine, weights)
    config.write_text("")
    flags = ["--config", str(config), "--threads", "1", "--speculation", "off"]
    with own_daemon(engine, flags) as daemon, Client(daemon.socket) as client:

        def served() -> str:
            return client.generate("a fine", max_tokens=8, ignore_eos=True).text()

        def reloaded(weights: Path) -> Reloaded:
            config.write_text(f'weights = "{weights}"\n')
            return ask(Reload(), Reloaded, str(daemon.socket))

        first = served()
        assert client.status().engine["weights"] == REFERENCE.name
        assert reloaded(weights) == Reloaded(["weights"], [])
        other = served()
        assert other != first
        assert client.status().engine["weights"] == "other"
        # A file that does not fit, or was damaged, changes nothing.
        damaged = bytearray(weights.read_bytes())
        damaged[-1] ^= 1
        (short_folder / "damaged").write_bytes(damaged)
        for name in ("engine/weights.json", "damaged"):
            with pytest.raises(HearthError) as caught:
                reloaded(short_folder / name)
            assert caught.value.code == "weights_invalid"
        assert served() == other
