import signal
import sys

import anyio

from daemon.supervision.actor_process import ActorProcess


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
