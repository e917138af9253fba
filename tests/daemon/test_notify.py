import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import sleep

import pytest

from hearth.daemon.watchdog import notify


@pytest.fixture
def manager(short_folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(short_folder / "notify"))
        listening.settimeout(2)
        yield listening


def test_the_manager_hears_the_message(manager: socket.socket) -> None:
    notify("READY=1", {"NOTIFY_SOCKET": manager.getsockname()})
    assert manager.recv(100) == b"READY=1"


def test_an_abstract_socket_begins_with_a_zero_byte() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0hearth-{id(listening)}")
        listening.settimeout(2)
        notify("STOPPING=1", {"NOTIFY_SOCKET": f"@hearth-{id(listening)}"})
        assert listening.recv(100) == b"STOPPING=1"


def test_a_manager_that_is_behind_is_waited_for_and_not_for_long(manager: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": manager.getsockname()}
    manager.settimeout(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        with suppress(BlockingIOError):
            # As many as the kernel keeps.
            while True:
                other.sendto(b"WATCHDOG=1", manager.getsockname())
    notify("READY=1", environ, patience_s=0.01)

    def read_later() -> None:
        sleep(0.05)
        manager.recv(100)

    reader = Thread(target=read_later)
    reader.start()
    notify("READY=1", environ, patience_s=20)
    reader.join()
    heard = []
    with suppress(BlockingIOError):
        while True:
            heard.append(manager.recv(100))
    assert heard[-1] == b"READY=1"
    assert heard.count(b"READY=1") == 1


def test_without_a_manager_nothing_happens(short_folder: Path) -> None:
    notify("READY=1", {})
    notify("READY=1", {"NOTIFY_SOCKET": str(short_folder / "gone")})
