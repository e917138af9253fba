"""Where adapters are kept, and what lies there."""

import re
import shutil
from pathlib import Path
from tempfile import mkdtemp

from runtime.adapters.stored import (
    AdapterRecord,
    adapter_folders,
    read_record,
    store_adapter,
)
from runtime.config import LLMEngineRunnerConfig
from runtime.errors import HearthError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MODE = 0o700


class AdapterFolder:
    """A folder of adapters as `store_adapter` writes them, each in a folder of its name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make the folder, for its owner alone; raises `invalid_value` where that cannot be."""
        try:
            self.path.mkdir(_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable("made", error) from error

    @property
    def names(self) -> list[str]:
        """The names of all that are kept; none where there is no folder."""
        return [name for name in adapter_folders(self.path) if _NAME.fullmatch(name)]

    def of(self, name: str) -> Path:
        """The folder of an adapter; raises `invalid_value` for what is no name."""
        if not _NAME.fullmatch(name):
            text = (
                f"{name[:80]!r} is no name for an adapter: it has letters, digits, '.', '_' and "
                "'-', 64 at most, and does not begin with one of the last three"
            )
            raise HearthError("invalid_value", text, "name")
        return self.path / name

    def add(self, name: str, source: str, config: LLMEngineRunnerConfig) -> AdapterRecord:
        """Check the adapter in the folder `source`, and keep it.

        Raises `invalid_value` for a name that is taken, and what `store_adapter` raises.
        """
        target = self.of(name)
        if target.exists():
            text = f"there is an adapter {name} already: remove it first, or take another name"
            raise HearthError("invalid_value", text, "name")
        if "\0" in source or not Path(source).is_absolute():
            text = "folder must be an absolute path"
            raise HearthError("invalid_value", text, "folder")
        self.make()
        return store_adapter(Path(source), config, target)

    def remove(self, name: str) -> None:
        """Forget an adapter; it is gone at once, also where its files take a moment.

        Raises `adapter_unknown`, and `invalid_value` where the folder cannot be changed.
        """
        folder = self.of(name)
        if not folder.exists():
            text = f"there is no adapter {name}: `hearth adapter list` shows them"
            raise HearthError("adapter_unknown", text, "name")
        try:
            # No name of an adapter: whoever lists the folder meanwhile does not see it.
            grave = Path(mkdtemp(prefix=".", dir=self.path))
            folder.rename(grave / name)
        except OSError as error:
            raise self._unusable("changed", error) from error
        shutil.rmtree(grave, ignore_errors=True)

    def record(self, name: str) -> AdapterRecord:
        """What is known of an adapter; raises `adapter_invalid`."""
        return read_record(self.of(name))

    def _unusable(self, what: str, error: OSError) -> HearthError:
        text = f"{self.path} cannot be {what} ({error.strerror})"
        return HearthError("invalid_value", text, "adapters")
