import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.shipped import engine_folder
from tests.daemon.door.harness import Harness, running_door


@contextmanager
def serving(socket: Path, *flags: str) -> Iterator[str]:
    """The address of a `hearth-http` before the daemon at that socket."""
    command = [sys.executable, "-m", "hearth_http", "--socket", str(socket), *flags]
    if "--unix" not in flags:
        command += ["--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as door:
        assert door.stdout is not None
        try:
            yield door.stdout.readline().removeprefix("listening at ").strip()
        finally:
            door.terminate()
    assert door.returncode == 0


@pytest.fixture(scope="module")
def home() -> Iterator[str]:
    """A door before a daemon with the shipped model."""
    with own_daemon(engine_folder("")) as daemon, serving(daemon.socket) as url:
        yield url


@pytest.fixture
def actors() -> Iterator[Harness]:
    with running_door(step_s=0.0) as door:
        yield door


@pytest.fixture
def door(actors: Harness) -> Iterator[str]:
    with serving(actors.path) as url:
        yield url


@contextmanager
def openai_client(url: str, key: str = "none") -> Iterator[openai.OpenAI]:
    """A client that repeats nothing by itself."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def client(home: str) -> Iterator[openai.OpenAI]:
    with openai_client(home) as made:
        yield made


@pytest.fixture
def played(door: str) -> Iterator[openai.OpenAI]:
    with openai_client(door) as made:
        yield made
