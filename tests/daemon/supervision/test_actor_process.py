import os
import signal
import sys
from pathlib import Path

import anyio
import msgspec
import pytest

from hearth.actors.addresses import SocketFolder
from hearth.actors.arena import Arena
from hearth.actors.roles import HostConfig
from hearth.daemon.supervision.supervisor import ActorProcess

COUNT_ARENAS = """
import os, pathlib, sys
found = [one for one in pathlib.Path("/proc/self/fd").iterdir() if os.path.islink(one)]
sys.exit(40 + sum("hearth-" in os.readlink(one) for one in found))
"""


async def ended(code: str) -> str:
    process = ActorProcess(await anyio.open_process([sys.executable, "-c", code]))
    return await process.wait()


async def test_an_end_is_told_by_status_or_signal() -> None:
    with anyio.fail_after(30):
        assert await ended("raise SystemExit(3)") == "it ended with status 3"
        assert await ended("import os; os.kill(os.getpid(), 9)") == "it was ended by SIGKILL"


async def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    number = 40
    assert number not in {member.value for member in signal.Signals}
    with anyio.fail_after(30):
        code = f"import os; os.kill(os.getpid(), {number})"
        assert await ended(code) == f"it was ended by signal {number}"


async def test_a_process_starts_from_our_code_wherever_the_daemon_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hearth"
    folder.mkdir()
    folder.joinpath("__init__.py").write_text("raise SystemExit(3)")
    # Who is not its parent ends it at once, with a status of the host's own.
    config = HostConfig(
        name="executor-1",
        role="executor",
        settings=msgspec.Raw(b"{}"),
        addresses=SocketFolder(tmp_path).addresses("executor", 1),
        parent=os.getppid(),
    )
    with anyio.fail_after(30):
        for gone in (False, True):
            (tmp_path / "gone").mkdir()
            monkeypatch.chdir(tmp_path / "gone" if gone else tmp_path)
            (tmp_path / "gone").rmdir()
            process = await ActorProcess.start(config)
            assert await process.wait() == "it ended with status 1"


async def test_a_process_inherits_what_its_configuration_names_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = tmp_path / "hearth" / "actors"
    actors.mkdir(parents=True)
    (actors.parent / "__init__.py").touch()
    host = actors / "host.py"
    host.write_text(COUNT_ARENAS)
    monkeypatch.setattr("hearth.daemon.supervision.supervisor._SOURCE", tmp_path)
    one, other = Arena.create("one", 64), Arena.create("other", 64)
    config = HostConfig(
        name="encoder-1",
        role="encoder",
        settings=msgspec.Raw(b"{}"),
        addresses=SocketFolder(tmp_path).addresses("encoder", 1),
        parent=os.getpid(),
        descriptors=(one.descriptor,),
    )
    with anyio.fail_after(30):
        process = await ActorProcess.start(config)
        assert await process.wait() == "it ended with status 41"
    for arena in (one, other):
        arena.close()
