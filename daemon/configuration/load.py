"""Settings from their sources, each named in messages as its user wrote it.

The sizes of the draft's tree, of version 0.1, are taken for one version more.
"""

import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from hearth.daemon.configuration.settings import SETTINGS, Settings, flag_of, replaced, variable_of
from hearth.daemon.configuration.words import allowed, nearest
from hearth.runtime.errors import HearthError
from hearth.runtime.options import EagleDraftingConfig

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


OLD_NAMES: dict[str, Any] = {
    "drafting_top_k": Annotated[int, Meta(ge=0, le=128)],
    "drafting_step": Annotated[int, Meta(ge=0, le=30)],
    "verify_tree_size": Annotated[int, Meta(ge=0, le=128)],
}
"""Types of the old settings; 0 counts as not given."""


def tree_of(sizes: Mapping[str, int]) -> EagleDraftingConfig | None:
    """The tree of these sizes by old name; raises `invalid_value` where one is missing."""
    missing = [name for name in OLD_NAMES if not sizes.get(name)]
    if len(missing) == len(OLD_NAMES):
        return None
    if missing:
        names = ", ".join(OLD_NAMES)
        raise HearthError(
            "invalid_value",
            f"{missing[0]} is not given: the draft's tree needs {names} together; draft_tree is "
            "all three",
            missing[0],
        )
    return EagleDraftingConfig(**sizes)


def warning_of(tree: EagleDraftingConfig | None) -> str:
    """Tell what to give in the place of the old names."""
    names, text = ", ".join(OLD_NAMES), "" if tree is None else str(tree)
    return f'{names} are taken by this version for the last time: give draft_tree = "{text}"'


SYSTEM_FILE = Path("/etc/hearth/hearth.toml")


def load_settings(
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    system_file: Path = SYSTEM_FILE,
) -> Settings:
    """Merge defaults, file, environment and flags, later ones winning.

    The file is `config`, else `$HEARTH_CONFIG`, else `system_file` where it exists. `flags` maps
    field names to values; None means not given. Raises `invalid_value` naming field and source.
    """
    environ = os.environ if environ is None else environ
    sources = [
        file_source(_file_of(config, environ, system_file)),
        environment_source(environ, [*SETTINGS, *OLD_NAMES]),
        flag_source(flags or {}),
    ]
    merged: dict[str, Any] = {}
    for source in sources:
        merged.update(_checked(source))
    old = {name: merged.pop(name) for name in OLD_NAMES if name in merged}
    if not old:
        return replaced(Settings(), **merged)
    if "draft_tree" in merged and any(old.values()):
        name = next(name for name, size in old.items() if size)
        where = next(one for one in reversed(sources) if name in one.values).describe(name)
        text = f"{where}: draft_tree is given as well, which is all three sizes: leave {name} out"
        raise HearthError("invalid_value", text, name)
    tree = merged.setdefault("draft_tree", tree_of(old))
    return structs.replace(replaced(Settings(), **merged), warnings=(warning_of(tree),))


def check_flags(flags: Mapping[str, Any]) -> None:
    """Raise `invalid_value` naming the first of `flags` whose value is not allowed."""
    _checked(flag_source(flags))


def _file_of(config: Path | None, environ: Mapping[str, str], system_file: Path) -> Path | None:
    if config is not None:
        return config
    if environ.get("HEARTH_CONFIG"):
        return Path(environ["HEARTH_CONFIG"])
    try:
        return system_file if system_file.is_file() else None
    except OSError:
        # It is in a folder that is closed to us: who reads it says so.
        return system_file


def _checked(source: Source) -> dict[str, Any]:
    for name in source.values:
        if name not in SETTINGS and name not in OLD_NAMES:
            raise HearthError(
                "invalid_value",
                f"{source.describe(name)}: there is no such setting{nearest(name, SETTINGS)}",
                name,
            )
    return {name: _convert(source, name, value) for name, value in source.values.items()}


def _convert(source: Source, name: str, value: Any) -> Any:
    setting = SETTINGS.get(name)
    kind, form = (OLD_NAMES[name], "") if setting is None else (setting.type, setting.declared.form)
    parse = None if setting is None else setting.declared.parse
    try:
        if parse is not None:
            return parse(msgspec.convert(value, str))
        return msgspec.convert(value, kind, strict=source.strict)
    except ValueError as error:
        # What msgspec says of a value is in `allowed`; what `parse` says of one is not.
        why = "" if isinstance(error, msgspec.ValidationError) or not error.args else f" ({error})"
        raise HearthError(
            "invalid_value",
            f"{source.describe(name)}: {value!r} is not allowed{why}, it must be "
            f"{allowed(kind, form)}",
            name,
        ) from error
