from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.manager import Manager


@pytest.fixture
def manager(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """The service manager of what is started; its watchdog waits for three seconds."""
    made = Manager(short_folder)
    monkeypatch.setenv("NOTIFY_SOCKET", made.address)
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    yield made
    if not made.closed:
        made.close()
