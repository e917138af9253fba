"""A folder that appears only when all of its files are there."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import HearthError


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target that becomes the target, or vanishes when the block fails."""
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise HearthError(
            "invalid_value", f"{target} exists already: remove it or name another", "target"
        )
    folder = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
        yield folder
        folder.rename(target)
    except OSError as error:
        raise HearthError(
            "invalid_value", f"{target} cannot be written: make room or name another", "target"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
