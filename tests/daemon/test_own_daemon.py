from pathlib import Path

import pytest

from hearth.daemon.cli.errors import Failure
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth_client import Client


def test_it_is_ready_inside_and_gone_after(tiny_engine: Path) -> None:
    with own_daemon(tiny_engine, ("--engine-kind", "simulated")) as daemon:
        with Client(daemon.socket) as client:
            assert client.status().state == "ready"
        assert '"event":"ready"' in daemon.log()
        daemon.stop()
    assert not daemon.socket.parent.exists()


def test_one_that_cannot_start_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"did not start: .*engine_missing"):
        own_daemon(tmp_path / "none").__enter__()


def test_waiting_for_one_that_runs_on_has_a_limit(tiny_engine: Path, short_folder: Path) -> None:
    daemon = OwnDaemon(short_folder, tiny_engine)
    try:
        with pytest.raises(Failure, match="did not stop in time"):
            daemon.wait(0.05)
        with pytest.raises(Failure, match="is not ready after 0 s"):
            daemon.wait_until_ready(0)
    finally:
        daemon.kill()
    assert daemon.wait(1) == -9


def test_the_user_s_own_settings_do_not_reach_it(
    tiny_engine: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_MAX_BATCH", "none of its concern")
    daemon = OwnDaemon(short_folder, tiny_engine)
    try:
        daemon.wait_until_ready()
    finally:
        daemon.kill()
