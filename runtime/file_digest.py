"""Digests of files, of large ones by many threads: a model's weights have gigabytes."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    """What tells a file's bytes from `begin` on: their SHA-256.

    Of more than 64 MiB it is that of the digests of pieces of 32 MiB, one behind the other, with
    "pieces-" in front.
    """
    large = path.stat().st_size - begin > 2 * PIECE_BYTES
    return _by_pieces(path, begin, _nobody) if large else _serial(path, begin, _nobody)


def has_digest(path: Path, recorded: str, read: Read | None = None, *, begin: int = 0) -> bool:
    """Whether a file has what `record_digest` gave, or a plain SHA-256 of an earlier version."""
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
    """For those who read without being told."""
