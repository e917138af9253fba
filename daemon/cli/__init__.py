"""A command group that imports a command only when it is used, so that `--help` is quick."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import click

from hearth.daemon.cli.errors import USAGE, run_and_exit
from hearth.daemon.configuration.words import nearest
from hearth.runtime.packages import VERSION


class LazyCommand(NamedTuple):
    """Target of a command (`module:name`) and its one line in the group's help."""

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
        """Parse as click does; without a command the help goes to standard error."""
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
        """Resolve as click does, with the nearest name in the message about an unknown one."""
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


_COMMANDS = {
    "serve": LazyCommand("hearth.daemon.cli.serve:serve", "Run the daemon."),
    "chat": LazyCommand("hearth.daemon.cli.chat:chat", "Talk to a running daemon."),
    "generate": LazyCommand(
        "hearth.daemon.cli.generate:generate", "Answer prompts without a daemon."
    ),
    "export": LazyCommand(
        "hearth.daemon.cli.export:export", "Build an engine folder from a model."
    ),
    "weights": LazyCommand(
        "hearth.daemon.cli.export:weights", "Write weights for an engine of others."
    ),
    "check": LazyCommand(
        "hearth.daemon.cli.check:check", "Say what would be used, and whether it fits."
    ),
    "status": LazyCommand("hearth.daemon.cli.status:status", "Show what a running daemon does."),
    "metrics": LazyCommand(
        "hearth.daemon.cli.status:metrics", "Print what a running daemon counts."
    ),
    "top": LazyCommand(
        "hearth.daemon.cli.top.command:top", "Show live what a daemon does, end requests."
    ),
    "trace": LazyCommand("hearth.daemon.cli.trace:trace", "Show where a request spent its time."),
    "install": LazyCommand(
        "hearth.daemon.cli.install:install", "Make Hearth a service of systemd."
    ),
    "uninstall": LazyCommand("hearth.daemon.cli.install:uninstall", "Take the service away again."),
    "reload": LazyCommand(
        "hearth.daemon.cli.status:reload", "Let a running daemon read its settings."
    ),
    "adapter": LazyCommand(
        "hearth.daemon.cli.adapter:adapter", "Add and remove a daemon's adapters."
    ),
    "keys": LazyCommand(
        "hearth.daemon.cli.keys:keys", "Keep the keys of clients that come by TCP."
    ),
    "http": LazyCommand("hearth.daemon.cli.http_door:http", "Serve OpenAI's and Ollama's API."),
    "demo": LazyCommand("hearth.daemon.demo.show:demo", "Start, ask two questions at once, stop."),
    "bench": LazyCommand("hearth.bench.__main__:bench", "Measure speed and memory here."),
}

_ELSEWHERE = {
    "stop": "Ctrl-C or kill ends hearth serve, systemctl stop hearth a service",
    "start": "hearth serve runs the daemon, systemctl start hearth a service",
    "run": "hearth serve runs a model, hearth chat talks to it",
    "pull": "nothing is fetched by name, hearth export takes a folder of Hugging Face's",
    "list": "hearth status shows what is served, hearth adapter list its adapters",
    "ps": "hearth top shows what runs, hearth status what is served",
    "show": "hearth check says what an engine is, hearth status what is served",
    "logs": "the daemon logs to standard error, a service to journalctl -u hearth",
}

_EPILOG = """\b
Start here:
  hearth demo                         see the model that ships with Hearth at work
  hearth serve                        run it
  hearth chat                         talk to it, in a second terminal
  hearth export MODEL_DIR ENGINE_DIR  make an engine of your own model

\b
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
Settings: hearth serve --help-all, or docs/configuration.md.
"""


@click.group(
    cls=LazyGroup,
    commands_by_name=_COMMANDS,
    elsewhere=_ELSEWHERE,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(VERSION, prog_name="hearth", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve language models on this machine over a local socket."""


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    run_and_exit(lambda: cli.main(prog_name="hearth", standalone_mode=False))
