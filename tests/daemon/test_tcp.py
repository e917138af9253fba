"""A whole daemon whose clients come by TCP."""

import socket
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner

from hearth.daemon.cli.status import status
from hearth.daemon.configuration.settings import settings_of
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Metrics, MetricsText, Reload, Reloaded
from hearth.daemon.door.keys import add_client, make_server_keys, remove_client
from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.service import serve
from hearth.runtime.errors import HearthError
from hearth_client import Client, NotAllowed


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port: int = unused.getsockname()[1]
    return port


def test_keys_are_added_and_removed_while_a_daemon_serves(
    tiny_engine: Path, short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, robot, arm = short_folder / "keys", short_folder / "robot", short_folder / "arm"
    make_server_keys(keys)
    add_client(keys, "robot", hand_over=robot)
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    flags = ["--engine-kind", "simulated", "--step-ms", "100"]
    flags += ["--tcp-port", str(port), "--keys", str(keys)]

    with own_daemon(tiny_engine, flags) as daemon, Client(daemon.socket) as local:

        def reload() -> Reloaded:
            return ask(Reload(), Reloaded, str(daemon.socket))

        shown = CliRunner().invoke(status, ["--socket", address, "--key", str(robot)])
        assert "ready" in shown.output
        assert reload() == Reloaded([], [])

        add_client(keys, "arm", hand_over=arm)
        with pytest.raises(NotAllowed):
            Client(address, client_key=arm).connect()
        assert reload() == Reloaded(["keys"], [])
        with Client(address, client_key=arm) as client, Client(address, client_key=robot) as other:
            ended = client.generate("a", max_tokens=80)
            replies = [one.generate("a", max_tokens=5) for one in (local, other)]
            for one in (ended, *replies):
                next(iter(one))
            remove_client(keys, "arm")
            assert reload() == Reloaded(["keys"], [])
            with pytest.raises(NotAllowed, match="not listed any more"):
                ended.text()
            for one in replies:
                one.text()
                assert one.done is not None
                assert one.done.usage.completion_tokens == 5
            with pytest.raises(NotAllowed, match="does not list this key"):
                client.status()

        (keys / "server.key_secret").chmod(0o644)
        with pytest.raises(HearthError, match=r"mode 0644.*chmod 600"):
            reload()
        (keys / "server.key_secret").chmod(0o600)
        text = ask(Metrics(), MetricsText, str(daemon.socket)).text
        refused = next(line for line in text.splitlines() if 'code="not_allowed"' in line)
        assert float(refused.split()[-1]) >= 1

        second = settings_of(
            socket=str(short_folder / "2"), tcp_port=port, keys=str(keys), log_format="json"
        )
        assert serve(second, tiny_engine) == 78
        structlog.reset_defaults()
        assert f"cannot listen on port {port} of 127.0.0.1" in capsys.readouterr().err
        assert local.status().state == "ready"
        log = daemon.log()
    assert f'"tcp":"127.0.0.1:{port}"' in log
    assert '"client":"arm"' in log
    assert "refused by TCP: keys that are not listed" in log
