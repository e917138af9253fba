"""Settings of version 0.1 that are taken for one version more: the sizes of the draft's tree."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from hearth.daemon.configuration.settings import SETTINGS, Settings, replaced
from hearth.daemon.configuration.sources import Source, environment_source, file_source, flag_source
from hearth.daemon.configuration.words import allowed, nearest
from hearth.runtime.errors import HearthError
from hearth.runtime.options import EagleDraftingConfig

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
    if "draft_tree" in merged:
        name = next(iter(old))
        where = next(one for one in reversed(sources) if name in one.values).describe(name)
        text = f"{where}: draft_tree is given as well, which is all three sizes: leave {name} out"
        raise HearthError("invalid_value", text, name)
    tree = tree_of(old)
    settings = replaced(Settings(), **merged, draft_tree=tree)
    return structs.replace(settings, warnings=(warning_of(tree),))


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
        raise HearthError(
            "invalid_value",
            f"{source.describe(name)}: {value!r} is not allowed, it must be {allowed(kind, form)}",
            name,
        ) from error
