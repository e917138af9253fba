"""Sources of settings; each names a setting in messages as its user wrote it."""

import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from hearth.daemon.configuration.settings import SETTINGS, flag_of, variable_of
from hearth.daemon.configuration.words import nearest
from hearth.runtime.errors import HearthError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX = "HEARTH_"
# Variables that are not settings: the settings file itself, the folder of built engines, and what
# clients show on TCP.
_OTHER_VARIABLES = frozenset({"HEARTH_CONFIG", "HEARTH_CACHE", "HEARTH_KEY", "HEARTH_SERVER_KEY"})

# Kubernetes sets these in every container of a namespace for a service whose name begins with
# "hearth". A plain HEARTH_PORT=8080 is a user's setting, and refused.
_SERVICE_LINK = re.compile(
    r"HEARTH_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    r"|HEARTH_(\w+_)?PORT=(tcp|udp|sctp)://.*"
)

_PATHS = frozenset(one.name for one in SETTINGS.values() if one.declared.path)
_WHOLE = re.compile(r"/|~|\w+://")
"""Begin of a path that needs no folder before it."""


class Source(msgspec.Struct, frozen=True):
    """Values by setting name; `strict` sources carry typed values, the others text."""

    kind: Literal["file", "environment", "flag"]
    values: dict[str, Any]
    path: str = ""

    @property
    def strict(self) -> bool:
        """True if values have their final types already."""
        return self.kind == "file"

    def describe(self, name: str) -> str:
        """The setting as its user wrote it."""
        if self.kind == "file":
            return f"{self.path}, {name}"
        if self.kind == "environment":
            return f"${variable_of(name)}"
        return flag_of(name)


def file_source(path: Path | None) -> Source:
    """The settings in a TOML file; empty without one. Raises `invalid_value` naming the file."""
    if path is None:
        return Source("file", {})
    try:
        if path.is_fifo() or (path.is_char_device() and not path.samefile(os.devnull)):
            # It may never end, and a daemon that reads its settings again would wait for it.
            text = f"the settings file {path} is a pipe or a device: give a file"
            raise HearthError("invalid_value", text, "config")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HearthError(
            "invalid_value", f"the settings file {path} cannot be read: {error.strerror}", "config"
        ) from error
    except (ValueError, RecursionError) as error:
        # Also a number of thousands of digits, and brackets that are nested as deep.
        place = _place_of(error)
        raise HearthError(
            "invalid_value", f"the settings file {path} is not valid TOML{place}", "config"
        ) from error
    return Source("file", _beside(path, values), str(path))


def _beside(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a file, with paths that begin in its folder and not where we happen to be."""
    folder = path.absolute().parent
    return {
        name: str(folder / value)
        if name in _PATHS and isinstance(value, str) and value and not _WHOLE.match(value)
        else value
        for name, value in values.items()
    }


def environment_source(environ: Mapping[str, str], names: Collection[str]) -> Source:
    """The settings among `environ`; an unknown HEARTH_ variable raises `invalid_value`.

    Variables set to the empty text count as not set; those of a Kubernetes service are left out.
    """
    values = {
        key: value
        for key, value in environ.items()
        if key.startswith(ENVIRONMENT_PREFIX)
        and key not in _OTHER_VARIABLES
        and value
        and not _SERVICE_LINK.fullmatch(f"{key}={value}")
    }
    known = {variable_of(name): name for name in names}
    for key in values:
        if key not in known:
            hint = nearest(key, known, ENVIRONMENT_PREFIX)
            raise HearthError("invalid_value", f"${key}: there is no such setting{hint}", key)
    return Source("environment", {known[key]: value for key, value in values.items()})


def flag_source(flags: Mapping[str, Any]) -> Source:
    """The settings given as flags; None means not given."""
    return Source("flag", {name: value for name, value in flags.items() if value is not None})


def _place_of(error: Exception) -> str:
    """`` (at line 3, column 7)`` where the parser says so, and whether a name is there twice."""
    text = str(error)
    start = text.rfind("(at ")
    twice = ": a name is there for the second time" if "overwrite" in text else ""
    return f" {text[start:]}{twice}" if start >= 0 else twice
