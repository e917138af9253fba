"""Clients, daemons and drivers of the scenes; `--client` chooses clients by name."""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from clients.conformance.driving import Client, Driver
from clients.conformance.scripted import Peer
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.daemon.shipped import engine_folder, vision_engine_folder

CLIENTS = Path(__file__).parents[1]
MISSING = 77
"""Exit code of a `check` that lacks its toolchain."""
SIMULATED = ("--engine-kind", "simulated", "--step-ms", "5", "--speculation", "off")
"""The shipped model's shape with a speed of its own, for scenes in the middle of a reply."""

Drive = Callable[[str | Path], Driver]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of clients."""
    group = parser.getgroup("conformance")
    group.addoption("--client", action="append", help="Name of a client; default all.")
    group.addoption("--client-folder", type=Path, help="Its folder, where that is elsewhere.")


def pytest_configure(config: pytest.Config) -> None:
    """Run programs of Python with this interpreter; none takes the settings of a user's daemon."""
    del config
    for name in [one for one in os.environ if one.startswith("HEARTH_")]:
        del os.environ[name]
    os.environ["PYTHON"] = os.environ["HEARTH_PYTHON"] = sys.executable


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Play each scene with each client that has a driver; the check of others is theirs alone."""
    if "client" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("client")
    program = "driver" if metafunc.module.__name__.rpartition(".")[2] != "test_check" else "check"
    names = chosen or sorted(one.parent.name for one in CLIENTS.glob(f"*/{program}"))
    metafunc.parametrize("client", names, indirect=True, scope="session")


class ByClient(LoadScopeScheduling):  # type: ignore[misc] # it has no types
    """All tests of a client go to the worker that builds it."""

    def _split_scope(self, nodeid: str) -> str:
        found = re.search(r"\[([a-z]+)[-\]]", nodeid)
        return found[1] if found else ""


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByClient:
    """Spread clients over the workers of pytest-xdist."""
    return ByClient(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the builds of `check` and the starts of daemons, which are set up, their own time."""
    for item in items:
        item.add_marker(pytest.mark.timeout(60, func_only=True))


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Client:
    """A client that has passed its own `check`; skips where its toolchain is absent."""
    name = request.param
    folder = request.config.getoption("client_folder") or CLIENTS / name
    found = Client(name, Path(folder).resolve())
    checked = found.run("check")
    told = (checked.stdout + checked.stderr).strip()
    if checked.returncode == MISSING:
        pytest.skip(f"{name}: {told.splitlines()[-1] if told else 'its toolchain is missing'}")
    if checked.returncode:
        pytest.fail(f"{name}: its check ended with {checked.returncode}\n{told}", pytrace=False)
    return found


@pytest.fixture
def drive(client: Client) -> Iterator[Drive]:
    """Start drivers, which end with the scene."""
    with ExitStack() as stack:
        yield lambda address: stack.enter_context(Driver(client, str(address)))


@pytest.fixture(scope="session")
def daemon() -> Iterator[OwnDaemon]:
    """A daemon with the shipped model."""
    with own_daemon(engine_folder("")) as started:
        yield started


@pytest.fixture(scope="session")
def seeing() -> Iterator[OwnDaemon]:
    """A daemon with the shipped model that sees, which takes small pictures alone."""
    with own_daemon(vision_engine_folder(), ["--image-bytes", "65536"]) as started:
        yield started


@pytest.fixture(scope="session")
def slow() -> Iterator[OwnDaemon]:
    """A daemon of two places whose steps take their time; a client may have four requests."""
    flags = [*SIMULATED, "--max-batch", "2", "--requests-per-client", "4", "--hold-s", "600"]
    with own_daemon(engine_folder(""), flags) as started:
        yield started


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as folder:
        yield Path(folder)


@pytest.fixture
def peer(short_folder: Path) -> Iterator[Peer]:
    """A scripted ROUTER."""
    with zmq.Context() as context, Peer(short_folder / "s", context) as made:
        yield made


@pytest.fixture
def driver(drive: Drive, peer: Peer) -> Driver:
    """A driver that is not connected to the scripted ROUTER yet."""
    return drive(peer.address)
