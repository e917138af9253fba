"""Digests of files, of large ones by many threads: a model's weights have gigabytes."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from hearth.runtime.errors import HearthError

Read = Callable[[int], None]
"""Hears the bytes of each piece that has been read."""
PIECE_BYTES = 32 << 20
BY_PIECES = "pieces-"
_BUFFER_BYTES = 1 << 20
_MOST_THREADS = 8


def file_digest(path: Path, read: Read | None = None) -> str:
    """The SHA-256 of a file."""
    return _serial(path, 0, read or _nobody)


def record_digest(path: Path, *, begin: int = 0) -> str:
    """SHA-256 of a file's bytes from `begin` on.

    Of more than 64 MiB that of the digests of pieces of 32 MiB, one behind the other, with
    "pieces-" in front.
    """
    large = path.stat().st_size - begin > 2 * PIECE_BYTES
    return _by_pieces(path, begin, _nobody) if large else _serial(path, begin, _nobody)


def has_digest(path: Path, recorded: str, read: Read | None = None, *, begin: int = 0) -> bool:
    """Return True if a file has the recorded digest, or a plain SHA-256 of an earlier version."""
    find = _by_pieces if recorded.startswith(BY_PIECES) else _serial
    return find(path, begin, read or _nobody) == recorded


def _serial(path: Path, begin: int, read: Read) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while piece := file.read(_BUFFER_BYTES):
            digest.update(piece)
            read(len(piece))
    return digest.hexdigest()


def _by_pieces(path: Path, begin: int, read: Read) -> str:
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    whole = hashlib.sha256()
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(threads) as pool:
        number, size = file.fileno(), os.fstat(file.fileno()).st_size
        places = range(begin, size, PIECE_BYTES)
        # The digests of bytes leave the interpreter to the other threads.
        for place, found in zip(places, pool.map(_piece(number), places), strict=True):
            whole.update(found)
            read(min(PIECE_BYTES, size - place))
    return f"{BY_PIECES}{whole.hexdigest()}"


def _piece(number: int) -> Callable[[int], bytes]:
    def digest(place: int) -> bytes:
        found, end = hashlib.sha256(), place + PIECE_BYTES
        while place < end and (data := os.pread(number, min(_BUFFER_BYTES, end - place), place)):
            found.update(data)
            place += len(data)
        return found.digest()

    return digest


def _nobody(_count: int) -> None:
    """Do nothing: the callback of those who want no progress."""


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target that becomes the target, or vanishes when the block fails."""
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise _exists(target)
    with _beside(target) as folder:
        folder.mkdir(parents=True)
        yield folder
        folder.rename(target)


@contextmanager
def fresh_file(target: Path) -> Iterator[Path]:
    """A file beside the target that becomes the target, or vanishes when the block fails."""
    if target.exists():
        raise _exists(target)
    with _beside(target) as path:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        path.replace(target)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    path = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        yield path
    except OSError as error:
        text = f"{target} cannot be written ({error.strerror}): make room or name another"
        raise HearthError("invalid_value", text, "target") from error
    finally:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            # Where nothing can be written, nothing can be removed, and the first is what to tell.
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _exists(target: Path) -> HearthError:
    how = "rm -r" if target.is_dir() else "rm"
    text = f"{target} exists already: remove it ({how} {quote(str(target))}) or name another"
    return HearthError("invalid_value", text, "target")


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of files that can be built again: $HEARTH_CACHE, $XDG_CACHE_HOME/hearth, or ~/.cache.

    Raises `invalid_value` for a user without a home, unless one of the first two is set.
    """
    environ = os.environ if environ is None else environ
    if environ.get("HEARTH_CACHE"):
        return Path(environ["HEARTH_CACHE"])
    base = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "hearth"
    except RuntimeError as error:
        raise HearthError(
            "invalid_value",
            "this user has no home to keep a cache in: set HEARTH_CACHE",
            "HEARTH_CACHE",
        ) from error
