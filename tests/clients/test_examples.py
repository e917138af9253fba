"""Programs in PROTOCOL.md, README.md and the client's page run as printed, and pass the types."""

import os
import re
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from mypy import api
from structlog.testing import capture_logs

from hearth.actors.arena import Arena
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


# The second one is for the door over HTTP.
@pytest.mark.parametrize("number", [0, 2, 3])
def test_the_programs_of_the_front_page(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = program("../README.md", number)
    given = GIVEN * ("camera_array" in code)
    seeing: dict[str, Any] = {"images_per_request": 1, "image_bytes": 1 << 10, "image_tokens": 16}
    with (
        closing(Arena.create("readme", 1 << 12)) as arena,
        running_door(step_s=0.0, arena=arena, **seeing) as door,
    ):
        monkeypatch.setenv("HEARTH_SOCKET", str(door.path))
        exec(compile(given + code, "README", "exec"), {})  # noqa: S102 - our own page
    assert "0 1 2 3 " in capsys.readouterr().out


async def test_the_async_program_of_the_client_s_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    exec(compile(program("python/README.md", 2), "README", "exec"), names)  # noqa: S102 - our own page
    with running_door(step_s=0.0) as door:
        monkeypatch.setenv("HEARTH_SOCKET", str(door.path))
        await names["tell"]()
    assert "0 1 2 3 " in capsys.readouterr().out


def test_the_page_on_clients_has_the_program_of_each() -> None:
    page = (CLIENTS.parent / "docs" / "clients.md").read_text(encoding="utf-8")
    clients = [one.parent for one in CLIENTS.glob("*/driver")]
    assert clients
    first = re.compile(r"^```\w.*?^```$", re.MULTILINE | re.DOTALL)
    for client in clients:
        own = first.search((client / "README.md").read_text("utf-8"))
        assert own is not None, client.name
        assert own.group() in page, f"docs/clients.md has another program for {client.name}"
    example = (CLIENTS / "python" / "example.py").read_text(encoding="utf-8")
    assert program("python/README.md", 0) == example


def test_the_loop_with_tools_of_the_readme(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with capture_logs(), running_door(step_s=0.0) as door:
        monkeypatch.setenv("HEARTH_SOCKET", str(door.path))
        exec(compile(program("python/README.md", 1), "README", "exec"), {})  # noqa: S102 - our own page
        first, second = door.actors.prepared
    assert first.chat is not None
    assert second.chat is not None
    assert [turn.role for turn in second.chat.turns] == ["user", "assistant", "tool"]
    assert second.chat.turns[1].reasoning == "hm"
    assert second.chat.turns[2].tool_call_id == second.chat.turns[1].tool_calls[0].id
    assert second.chat.tools == first.chat.tools
    assert capsys.readouterr().out.startswith("get_weather {'a': 1}\n0 1 2 3 ")


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


PAGES = (CLIENTS.parent / "README.md", CLIENTS / "python" / "README.md")
GIVEN = """
import numpy as np
from numpy.typing import NDArray

camera_array: NDArray[np.uint8] = np.zeros((4, 4, 3), np.uint8)
"""
"""What a sample of README takes as given."""


SETTINGS_OF_A_NODE = """
from hearth_client import Client, GenerateOptions

options: GenerateOptions = {"max_tokens": 5, "temperature": 0.2, "stop": "."}
with Client() as client:
    print(client.generate("x", **options).text())
"""


@pytest.mark.parametrize("version", ["3.10", "3.11"])
def test_the_samples_are_typed(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [SETTINGS_OF_A_NODE]
    for page in PAGES:
        found = re.findall(
            r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
        )
        samples += [GIVEN * ("camera_array" in one) + one for one in found]
    assert len(samples) == 8
    files = [tmp_path / f"sample_{index}.py" for index in range(len(samples))]
    for file, sample in zip(files, samples, strict=True):
        file.write_text(sample)
    monkeypatch.setenv("MYPYPATH", str(CLIENTS / "python"))
    monkeypatch.chdir(tmp_path)  # Away from the settings of this repository.
    given = ["--strict", "--python-version", version, "--cache-dir", os.devnull]
    told, _, code = api.run([*given, *map(str, files)])
    assert code == 0, told
