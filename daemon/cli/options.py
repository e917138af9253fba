"""Options that several commands share; those of the daemon are made from its settings."""

from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from hearth.daemon.cli.errors import wrong_usage
from hearth.daemon.configuration.load import OLD_NAMES, check_flags, load_settings
from hearth.daemon.configuration.settings import GROUPS, SETTINGS, Settings, flag_of
from hearth.daemon.configuration.words import shown

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
speculation_option = click.option(
    "--speculation/--no-speculation",
    default=None,
    help="Try several tokens a step, or never; by default where it is measured to be faster.",
)
adapter_option = click.option(
    "--adapter", default="", metavar="NAME", help="The adapter that answers; default none."
)
socket_option = click.option(
    "--socket",
    metavar="PATH",
    help="Socket of the daemon; default $HEARTH_SOCKET, or where hearth serve puts it.",
)
key_option = click.option(
    "--key",
    metavar="FILE",
    help="Keys for a daemon at tcp://, from hearth keys add; default $HEARTH_KEY.",
)


SAMPLING = (
    ("--temperature", float, "0 always takes the most likely token."),
    ("--top-k", int, "Keep the K most likely tokens; 0 for all."),
    ("--top-p", float, "Keep the likeliest tokens that make up this probability."),
    ("--min-p", float, "Keep tokens with at least this share of the best probability."),
    ("--repetition-penalty", float, "Divide the scores of tokens seen before."),
    ("--presence-penalty", float, "Lower the scores of tokens generated before."),
    ("--frequency-penalty", float, "Lower them by how often they were generated."),
)
"""Options of sampling; one that is not given is the model's own, as it was published."""


def sampling_options(command: Command) -> Command:
    """Add the options of sampling, each None where it is not given."""
    for flag, kind, text in reversed(SAMPLING):
        command = click.option(flag, type=kind, default=None, help=text)(command)
    return command


def variable_value(text: str) -> Any:
    """Value of a template's variable: JSON's, or the text itself."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return text if isinstance(value, (dict, list)) else value


def _read_tools(
    _ctx: click.Context, _param: click.Parameter, files: tuple[Path, ...]
) -> list[dict[str, Any]]:
    """The tools in files, of which each has one or a list; also as others wrap them."""
    tools: list[dict[str, Any]] = []
    for file in files:
        found = _read_json(file)
        for one in found if isinstance(found, list) else [found]:
            tool = one.get("function", one) if isinstance(one, dict) else None
            if not isinstance(tool, dict):
                raise click.BadParameter(f"{file} has neither a tool nor a list of tools")
            tools.append(tool)
    return tools


def _read_schema(_ctx: click.Context, _param: click.Parameter, file: Path | None) -> Any:
    return None if file is None else _read_json(file)


def _read_json(file: Path) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise click.BadParameter(f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise click.BadParameter(f"{file} is not JSON") from error


def _read_variables(
    _ctx: click.Context, _param: click.Parameter, given: tuple[str, ...]
) -> dict[str, Any]:
    pairs = [one.partition("=") for one in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise click.BadParameter(f"{name!r} is not of the form NAME=VALUE")
    return {name: variable_value(text) for name, _, text in pairs}


_FILE = click.Path(path_type=Path)
tool_option = click.option(
    "--tool",
    "tools",
    multiple=True,
    callback=_read_tools,
    type=_FILE,
    metavar="FILE.json",
    help="A tool that the model may call, or a list of them; repeatable.",
)
schema_option = click.option(
    "--schema",
    callback=_read_schema,
    type=_FILE,
    metavar="FILE.json",
    help="A JSON schema that replies have to follow; objects have no properties beyond it.",
)
template_option = click.option(
    "--template",
    multiple=True,
    callback=_read_variables,
    metavar="NAME=VALUE",
    help="A variable of the chat template, enable_thinking=false for instance; repeatable.",
)


class NumberRange(click.FloatRange):
    """A FloatRange that refuses NaN, which click's accepts: no comparison with it is true."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number; anything else is wrong usage."""
        number = float(super().convert(value, param, ctx))
        return number if isfinite(number) else self.fail(f"{value} is not a number", param, ctx)


def with_options(options: Mapping[str, tuple[Any, str]]) -> Callable[[Command], Command]:
    """Add options, each by the name of its value with its type and help, to a command."""

    def decorate(command: Command) -> Command:
        for name, (kind, text) in reversed(list(options.items())):
            flag = "--" + name.replace("_", "-")
            # One that is not given is None, whatever it is.
            given = {"is_flag": True, "default": None} if kind is bool else {"type": kind}
            command = click.option(flag, name, help=text, **given)(command)
        return command

    return decorate


def refuse_without(owner: str, given: Mapping[str, Any]) -> None:
    """Raise `click.UsageError` for the first of `given` that has a value: it is for `owner`."""
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is for {owner}")


_ALL = "hearth.help_all"


def _show_all(ctx: click.Context, _param: click.Parameter, asked: object) -> None:
    if asked:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show this message with the settings for experts too.",
)


class SettingsCommand(click.Command):
    """A command with all settings, which its help shows by groups; `--help` those of guides."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """List parameters as click does, with `--help-all` behind `--help`."""
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Format options as click does, with the settings behind the other ones."""
        records = {
            param.name: record
            for param in self.get_params(ctx)
            if (record := param.get_help_record(ctx)) is not None
        }
        grouped = {title: [records.pop(name) for name in names] for title, names in GROUPS.items()}
        if not ctx.meta.get(_ALL):
            del grouped["Settings for experts"]
        for title, rows in {"Options": list(records.values()), **grouped}.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def settings_options(*names: str) -> Callable[[Command], Command]:
    """Add `--config` and a flag for each named setting (all of them without names)."""

    def decorate(command: Command) -> Command:
        asked = names or tuple(SETTINGS)
        if "draft_tree" in asked:
            for name in OLD_NAMES:
                command = click.option(flag_of(name), name, default=None, hidden=True)(command)
        for name in reversed(asked):
            command = _setting_option(name)(command)
        config = click.option(
            "--config",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Settings file; default $HEARTH_CONFIG, else /etc/hearth/hearth.toml if there.",
        )
        return config(command)

    return decorate


def settings_from(config: Path | None, flags: dict[str, Any]) -> Settings:
    """The settings for the flags that `settings_options` gave a command.

    Raises `click.UsageError` for a wrong flag and `HearthError` for a wrong file or variable.
    """
    with wrong_usage():
        check_flags(flags)
    return load_settings(config, flags=flags)


def _setting_option(name: str) -> Callable[[Command], Command]:
    setting, flag = SETTINGS[name], flag_of(name)
    default, text = setting.default, setting.declared.description
    if default not in ("", None):
        text += f"  [{shown(default)}]"
    if isinstance(default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
    metavar = {int: "N", float: "X"}.get(type(default), "TEXT")
    return click.option(flag, name, default=None, metavar=metavar, help=text)
