"""Folders and files that appear only when they are whole."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from runtime.errors import HearthError


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
