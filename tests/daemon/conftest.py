from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.runtime.export import ExportOptions, export_model
from tests.daemon.manager import Manager

REFERENCE = Path(__file__).parent.parent / "references" / "qwen3"


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine folder of a random model: 4 rows of 96 tokens. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("engines") / "tiny"
    export_model(REFERENCE, folder, ExportOptions(capacity=96, max_batch=4))
    return folder


@pytest.fixture
def manager(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """The service manager of what is started; its watchdog waits for three seconds."""
    made = Manager(short_folder)
    monkeypatch.setenv("NOTIFY_SOCKET", made.address)
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    yield made
    if not made.closed:
        made.close()
