"""The model that ships with Hearth, its draft, and their engine folder in the user's cache."""

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import click
from msgspec import structs

from hearth.daemon.configuration.settings import Settings
from hearth.daemon.shipped_files import MODELS
from hearth.runtime.config import CONFIG_FILE, ENGINE_FORMAT
from hearth.runtime.errors import HearthError
from hearth.runtime.files import cache_folder
from hearth.runtime.generation.deployment import load_deployment
from hearth.runtime.onnx_runtime import installed_version
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.packages import VERSION

Progress = Callable[[str, int, int], None]
SOURCE, DRAFT, VISION = MODELS["home"], MODELS["home-draft"], MODELS["home-vision"]


def engine_folder(
    engine: str,
    progress: Progress | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    kernels: bool = False,
) -> Path:
    """The folder named `engine`, or with an empty name that of the shipped model.

    The latter is exported on first use, with its draft: for `kernels`, else for ONNX Runtime on the
    CPU. Raises `engine_missing` when the shipped model or its draft is absent.
    """
    if engine:
        # Absolute, because actors in processes of their own have another working folder.
        return Path(engine).expanduser().resolve()
    return shipped_engine(SOURCE, DRAFT, cache_folder(environ), progress, kernels=kernels)


def wants_kernels(settings: Settings) -> bool:
    """True if the shipped model is to run on kernels: on a GPU, where no other kind is named."""
    if settings.runtime.engine_kind == "auto":
        return settings.runtime.device == "cuda"
    return settings.runtime.engine_kind == "kernels"


def same_engine(one: Settings, other: Settings) -> bool:
    """True if both settings name the same engine folder."""
    if one.engine or other.engine:
        return one.engine == other.engine
    return wants_kernels(one) == wants_kernels(other)


def vision_engine_folder(progress: Progress | None = None) -> Path:
    """The engine folder of the shipped model's vision variant, exported on first use.

    Raises `engine_missing` when the variant is absent.
    """
    return shipped_engine(VISION, None, cache_folder(None), progress)


def shipped_engine(
    source: Path,
    draft: Path | None,
    cache: Path,
    progress: Progress | None = None,
    *,
    kernels: bool = False,
) -> Path:
    """The engine folder of `source` and `draft` in `cache`, exported unless it is there and whole.

    Its path carries a digest of both, of the version of Hearth and its format, and of what runs it,
    so a change of any of them gives a new folder. Processes that ask at the same time share one
    export.
    """
    sources = [source] if draft is None else [source, draft]
    for folder in sources:
        if not (folder / CONFIG_FILE).is_file():
            raise HearthError(
                "engine_missing",
                f"the shipped model is not at {folder}: give an engine folder, made by "
                "hearth export",
                "engine",
            )
    # The dialect of a graph depends on what this ONNX Runtime reads; kernels need none.
    runs_on = "kernels" if kernels else installed_version()
    target = cache / "engines" / _digest(runs_on, *sources) / source.name
    if _fault(target) is None:
        return target
    with _locked(cache):
        fault = _fault(target)
        if fault is not None:
            if target.exists():
                click.echo(f"the engine of the shipped model is built again: {fault}", err=True)
                rmtree(target)
            _export(source, draft, target, progress, kernels=kernels)
    return target


def _fault(folder: Path) -> str | None:
    """Fault of an engine folder, every byte of it verified; None for a sound one."""
    try:
        load_deployment(folder, RuntimeOptions())
    except HearthError as error:
        return error.message.partition(": export")[0]
    return None


def _export(
    source: Path, draft: Path | None, target: Path, progress: Progress | None, *, kernels: bool
) -> None:
    from hearth.runtime.export import DraftOptions, ExportOptions, export_model  # noqa: PLC0415 - slow import

    options = ExportOptions(draft=None if draft is None else DraftOptions(folder=draft))
    if kernels:
        options = structs.replace(options, backend="kernels", device="cuda", dtype="float16")
    try:
        export_model(source, target, options, progress)
    except HearthError as error:
        if error.field != "target":
            raise
        reason = error.message.partition(": make room")[0]
        text = f"{reason}: make room, or set $HEARTH_CACHE to another folder"
        raise HearthError(error.code, text, "HEARTH_CACHE") from error


def _digest(runs_on: str, *folders: Path) -> str:
    digest = hashlib.sha256(f"{VERSION} {ENGINE_FORMAT} {runs_on}".encode())
    for path in (path for folder in folders for path in sorted(folder.iterdir())):
        if path.is_file():
            digest.update(f"{path.parent.name}/{path.name}".encode())
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
