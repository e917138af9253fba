"""A command group that imports a command only when it is used, so that `--help` is quick."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click

from daemon.cli.errors import USAGE
from daemon.configuration.words import nearest


class LazyCommand(NamedTuple):
    """Where a command lies (`module:name`) and its one line in the group's help."""

    target: str
    summary: str


class LazyGroup(click.Group):
    """A group of `LazyCommand`s, listed in the order given.

    `elsewhere` says what does here what other tools have a command for, by its name there.
    """

    def __init__(
        self,
        *,
        commands_by_name: Mapping[str, LazyCommand],
        elsewhere: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._lazy = commands_by_name
        self._elsewhere = elsewhere or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does; where no command is named the help goes to standard error."""
        if not args:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(USAGE)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names of all commands."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Import and return a command; None when there is no such name."""
        if cmd_name not in self._lazy:
            return None
        module, _, name = self._lazy[cmd_name].target.partition(":")
        command = getattr(import_module(module), name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self._lazy[cmd_name].target} is not a command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest name in the message about an unknown one."""
        name = args[0]
        if name not in self._lazy and not name.startswith("-"):
            known = self._elsewhere.get(name)
            hint = f": {known}" if known else nearest(name, self._lazy)
            raise click.UsageError(f"there is no command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """List the commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.summary) for name, lazy in self._lazy.items()])
