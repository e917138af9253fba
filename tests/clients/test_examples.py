"""The programs in PROTOCOL.md and README.md run as they are printed."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from hearth.daemon.door.keys import add_client, make_server_keys, read_keys
from tests.clients.vectors import CLIENTS
from tests.daemon.door.harness import greet, running_door


def program(page: str, number: int) -> str:
    text = (CLIENTS / page).read_text(encoding="utf-8")
    programs: list[str] = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return programs[number]


def test_the_client_of_the_readme(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_door(step_s=0.0) as door:
        monkeypatch.setenv("HEARTH_SOCKET", str(door.path))
        exec(compile(program("python/README.md", 0), "README", "exec"), {})  # noqa: S102 - our own page
    assert "0 1 2 3 " in capsys.readouterr().out


def test_the_client_in_thirty_lines_outlives_its_lease(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    msgpack = SimpleNamespace(packb=msgspec.msgpack.encode, unpackb=msgspec.msgpack.decode)
    monkeypatch.setitem(sys.modules, "msgpack", msgpack)
    # The door logs to the same standard output, in the middle of what the program prints.
    with capture_logs(), running_door(step_s=0.01, lease_s=1.0) as door:
        code = program("PROTOCOL.md", 1).replace("/run/hearth/hearth.sock", str(door.path))
        names: dict[str, Any] = {}
        with pytest.raises(SystemExit) as caught:
            exec(compile(code, "PROTOCOL", "exec"), names)  # noqa: S102 - our own page
        names["context"].destroy()
    assert caught.value.code is None
    assert "254 255 " in capsys.readouterr().out


def test_the_lines_for_tcp_reach_the_daemon(tmp_path: Path) -> None:
    public = make_server_keys(tmp_path / "keys")
    add_client(tmp_path / "keys", "robot", hand_over=tmp_path / "robot.key_secret")
    with running_door(keys=read_keys(tmp_path / "keys")) as door:
        code = program("PROTOCOL.md", 0)
        for printed, here in (
            ("the public key that `hearth keys list` shows", public),
            ("robot.key_secret", str(tmp_path / "robot.key_secret")),
            ("7700", str(door.door.tcp_port)),
        ):
            assert printed in code
            code = code.replace(printed, here)
        names: dict[str, Any] = {}
        exec(compile(code, "PROTOCOL", "exec"), names)  # noqa: S102 - our own page
        names["socket"].setsockopt(zmq.RCVTIMEO, 5000)
        assert greet(names["socket"])["t"] == "welcome"
        names["context"].destroy()
