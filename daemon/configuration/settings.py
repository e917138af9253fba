"""The daemon's settings: sections that their owners hold, and the flat names that users type."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import structs
from msgspec.inspect import Metadata, type_info

from hearth.actors.settings import EncoderOptions, LogSettings, PolicySettings
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.supervision.restart_policy import SupervisionSettings
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.setting import Declared, setting


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All that an operator may choose; times in seconds unless the name says otherwise.

    What the runtime leaves out unless it is asked, a daemon has: speculation and a prefix cache.
    `warnings` are about names of an earlier version.
    """

    engine: Annotated[
        str, setting("Engine folder to serve; empty for the shipped model.", path=True)
    ] = ""
    reply_format: Annotated[
        str,
        setting(
            "Form in which the model writes calls of tools and reasoning, by its name in "
            "docs/conversation.md, hermes for instance, or none; empty for what its template "
            "tells, which `welcome` names as `tool_format`.",
            expert=True,
        ),
    ] = ""
    runtime: RuntimeOptions = RuntimeOptions(
        prefix_cache_bytes=256 << 20, speculation=SpeculationOptions(method="auto")
    )
    scheduler: PolicySettings = PolicySettings()
    door: DoorSettings = DoorSettings()
    encoder: EncoderOptions = EncoderOptions()
    supervision: SupervisionSettings = SupervisionSettings()
    drain_s: Annotated[
        float,
        setting("How long running requests may finish after a stop.", ge=0, le=3600, reloads=True),
    ] = 5.0
    metrics_port: Annotated[
        int,
        setting("Port of 127.0.0.1 that serves metrics to Prometheus; 0 for none.", ge=0, le=65535),
    ] = 0
    metrics_socket: Annotated[
        str,
        setting("Path of a socket that serves the same; empty for none.", expert=True, path=True),
    ] = ""
    traces: Annotated[
        Literal["off", "otlp"], setting("`otlp` sends spans of each request to a collector.")
    ] = "off"
    logs: LogSettings = LogSettings()
    warnings: tuple[str, ...] = ()


class Setting(NamedTuple):
    """A setting by its flat name; `path` leads to it from `Settings`."""

    name: str
    path: tuple[str, ...]
    type: Any
    default: Any
    declared: Declared

    def of(self, settings: Settings) -> Any:
        """The value that `settings` have."""
        found: Any = settings
        for step in self.path:
            found = getattr(found, step)
        return found


def _settings_of(section: msgspec.Struct, path: tuple[str, ...] = ()) -> Iterator[Setting]:
    for field in structs.fields(section):
        default, own = getattr(section, field.name), (*path, field.name)
        if isinstance(default, msgspec.Struct):
            yield from _settings_of(default, own)
        elif (declared := _declared(field.type)) is not None:
            yield Setting(field.encode_name, own, field.type, default, declared)


def _declared(kind: Any) -> Declared | None:
    annotation = type_info(kind)
    extra = annotation.extra if isinstance(annotation, Metadata) else None
    return (extra or {}).get("setting")


SETTINGS: dict[str, Setting] = {one.name: one for one in _settings_of(Settings())}
"""Every field of every section that is declared a setting, by its flat name."""

GROUPS: dict[str, list[str]] = {
    "Settings": [one.name for one in SETTINGS.values() if not one.declared.expert],
    "Settings for experts": [one.name for one in SETTINGS.values() if one.declared.expert],
}


def flag_of(name: str) -> str:
    """The flag of `hearth serve` for a flat name."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable for a flat name."""
    return "HEARTH_" + name.upper()


def settings_of(**values: Any) -> Settings:
    """The defaults, with these values by flat name."""
    return replaced(Settings(), **values)


def replaced(settings: Settings, **values: Any) -> Settings:
    """The settings with these values by flat name in the place of theirs."""
    for name, value in values.items():
        settings = _put(settings, SETTINGS[name].path, value)
    return settings


def _put(section: Any, path: tuple[str, ...], value: Any) -> Any:
    head, *rest = path
    inner = _put(getattr(section, head), tuple(rest), value) if rest else value
    return structs.replace(section, **{head: inner})
