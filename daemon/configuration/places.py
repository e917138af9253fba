"""Places of the daemon's persistent files."""

from collections.abc import Mapping
from pathlib import Path


def adapters_folder(setting: str, environ: Mapping[str, str]) -> Path:
    """Folder of the adapters: as set, else in the service's state, else in the user's."""
    if setting:
        return Path(setting).absolute()
    states = environ.get("STATE_DIRECTORY", "")
    if states:
        # A service with several has them joined by colons.
        return Path(states.split(":")[0]) / "adapters"
    own = environ.get("XDG_STATE_HOME")
    return (Path(own) if own else _home() / ".local" / "state") / "hearth" / "adapters"


def _home() -> Path:
    """The user's home; for one that has none, as in many a container, where none can be made."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")
