"""The model that ships with Hearth, and its engine folder in the user's cache."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from runtime.config import CONFIG_FILE
from runtime.errors import HearthError
from runtime.version import VERSION

Progress = Callable[[str, int, int], None]
SOURCE = Path(__file__).parent.parent / "models" / "home"


def engine_folder(
    engine: str, progress: Progress | None = None, environ: Mapping[str, str] | None = None
) -> Path:
    """The folder named `engine`, or with an empty name that of the shipped model.

    The latter is exported on first use. Raises `engine_missing` when the shipped model is absent.
    """
    if engine:
        # Absolute, because actors in processes of their own have another working folder.
        return Path(engine).expanduser().resolve()
    return shipped_engine(SOURCE, cache_folder(environ), progress)


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where built engines are kept: $HEARTH_CACHE, else $XDG_CACHE_HOME/hearth, else ~/.cache."""
    environ = os.environ if environ is None else environ
    if environ.get("HEARTH_CACHE"):
        return Path(environ["HEARTH_CACHE"])
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "hearth"
    return Path.home() / ".cache" / "hearth"


def shipped_engine(source: Path, cache: Path, progress: Progress | None = None) -> Path:
    """The engine folder of `source` in `cache`, exported when it is not there yet.

    Its path carries a digest of the model and of the versions of Hearth and ONNX Runtime, so a
    change of any of them gives a new folder. Processes that ask at the same time share one export.
    """
    if not (source / CONFIG_FILE).is_file():
        raise HearthError(
            "engine_missing",
            f"the shipped model is not at {source}: give an engine folder, made by hearth export",
            "engine",
        )
    target = cache / "engines" / _digest(source) / source.name
    if (target / CONFIG_FILE).is_file():
        return target
    with _locked(cache):
        if not (target / CONFIG_FILE).is_file():
            from runtime.export import ExportOptions, export_model  # noqa: PLC0415 - slow import

            export_model(source, target, ExportOptions(), progress)
    return target


def _digest(source: Path) -> str:
    # The dialect of the export depends on what this ONNX Runtime reads.
    digest = hashlib.sha256(f"{VERSION} {version('onnxruntime')}".encode())
    for path in sorted(source.iterdir()):
        if path.is_file():
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / "export.lock").open("w")
    except OSError as error:
        raise HearthError(
            "invalid_value",
            f"the cache folder {cache} cannot be written: set $HEARTH_CACHE to one that can",
            "HEARTH_CACHE",
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
