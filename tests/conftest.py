import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.bench.toy_daemon import toy_engine
from hearth.daemon.cli.errors import keep_to_this_machine
from hearth.runtime.export import ExportOptions, export_model

REFERENCE = Path(__file__).parent / "references" / "qwen3"

# Before any test loads a library.
keep_to_this_machine(os.environ)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and say why; let files with slow tests begin."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    for item in marked if reason else ():
        item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))
    # A file that takes long must not be what the last process is left with.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def _why_no_gpu() -> str | None:
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - an extra, asked for only where needed
    except ImportError:
        return "cuda-bindings is not installed"
    try:
        (error,) = driver.cuInit(0)
        failed, count = driver.cuDeviceGetCount()
    except RuntimeError as missing:
        return str(missing)
    if error or failed or not count:
        return f"{error.name}, {count or 0} devices"
    return None


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The one event loop that the daemon uses."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine folder that benches take where none is given."""
    return toy_engine(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine folder of a random model: 4 rows of 96 tokens. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("engines") / "tiny"
    export_model(REFERENCE, folder, ExportOptions(capacity=96, max_batch=4))
    return folder


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for socket names: a local socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hearth-", dir="/tmp") as folder:
        yield Path(folder)
