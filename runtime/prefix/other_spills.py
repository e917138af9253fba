"""What other engines have left in the folder of the prefix cache."""

import re
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from runtime.prefix.spill_file import SUFFIX

_ENGINES = re.compile(r"[0-9a-f]{32}\.v[0-9]+")


class _File(NamedTuple):
    used: float
    size: int
    path: Path


class OtherSpills:
    """Pages of other engines, and of other versions, in the same folder: the oldest goes first."""

    def __init__(self, folder: Path, own: Path) -> None:
        found = []
        for path in folder.glob(f"*/*{SUFFIX}"):
            if path.parent != own and _ENGINES.fullmatch(path.parent.name):
                with suppress(OSError):
                    facts = path.lstat()
                    found.append(_File(facts.st_mtime, facts.st_size, path))
        self._files = deque(sorted(found))
        self.bytes = sum(file.size for file in found)

    def shrink_to(self, most_bytes: int) -> None:
        """Remove files until the rest takes no more than that, or nothing is left."""
        while self._files and self.bytes > most_bytes:
            file = self._files.popleft()
            self.bytes -= file.size
            # Whoever put it there may have removed it, and a folder goes with its last file.
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
                file.path.parent.rmdir()
