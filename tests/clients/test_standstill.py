"""A machine that stands still for longer than anybody would wait, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

# The lease is longer than what a pause counts at the door, and so is the client's patience.
BLOCKING = """
from hearth_client import Client
from tests.daemon.door.harness import running_door

with running_door(step_s=0.3, lease_s=1.5) as door, Client(door.path, silence_s=0.9) as client:
    generation = client.generate("count", max_tokens=6)
    print(next(generation).text, flush=True)
    assert generation.text() == "0 1 2 3 4 5 "
"""
ASYNC = """
import anyio, sys
from hearth_client import AsyncClient
from tests.daemon.door.harness import running_door

async def count(path):
    async with AsyncClient(path, silence_s=0.9) as client:
        generation = await client.generate("count", max_tokens=6)
        print((await anext(generation)).text, flush=True)
        assert await generation.text() == "0 1 2 3 4 5 "

with running_door(step_s=0.3, lease_s=1.5) as door:
    anyio.run(count, door.path, backend=sys.argv[1])
"""


@pytest.mark.parametrize("backend", [None, "asyncio", "trio"])
def test_a_reply_goes_on_where_it_was(backend: str | None) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [ASYNC, backend] if backend else [BLOCKING]
    command = [sys.executable, "-c", *program]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0 \n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.7)
        process.send_signal(signal.SIGCONT)
        process.communicate()
    assert process.returncode == 0
