import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The one event loop that the daemon uses."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for socket names: a local socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hearth-", dir="/tmp") as folder:
        yield Path(folder)
