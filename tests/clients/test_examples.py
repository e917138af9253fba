"""The programs in PROTOCOL.md and README.md run as they are printed."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.clients.vectors import CLIENTS
from tests.daemon.door.harness import running_door


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
        code = program("PROTOCOL.md", 0).replace("/run/hearth/hearth.sock", str(door.path))
        names: dict[str, Any] = {}
        with pytest.raises(SystemExit) as caught:
            exec(compile(code, "PROTOCOL", "exec"), names)  # noqa: S102 - our own page
        names["context"].destroy()
    assert caught.value.code is None
    assert "254 255 " in capsys.readouterr().out
