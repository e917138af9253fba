import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from daemon.configuration.settings import FIELDS, Settings
from daemon.configuration.sources import Source, environment_source, file_source, flag_source
from daemon.configuration.words import allowed, nearest
from runtime.errors import HearthError

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
        environment_source(environ, FIELDS),
        flag_source(flags or {}),
    ]
    merged: dict[str, Any] = {}
    for source in sources:
        merged.update(_checked(source))
    return Settings(**merged)


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
        if name not in FIELDS:
            raise HearthError(
                "invalid_value",
                f"{source.describe(name)}: there is no such setting{nearest(name, FIELDS)}",
                name,
            )
    return {name: _convert(source, name, value) for name, value in source.values.items()}


def _convert(source: Source, name: str, value: Any) -> Any:
    try:
        return msgspec.convert(value, FIELDS[name].type, strict=source.strict)
    except msgspec.ValidationError as error:
        raise HearthError(
            "invalid_value",
            f"{source.describe(name)}: {value!r} is not allowed, it must be "
            f"{allowed(FIELDS[name].type)}",
            name,
        ) from error
