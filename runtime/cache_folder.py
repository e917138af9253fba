import os
from collections.abc import Mapping
from pathlib import Path

from runtime.errors import HearthError


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where what can be built again is kept: $HEARTH_CACHE, $XDG_CACHE_HOME/hearth, else ~/.cache.

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
