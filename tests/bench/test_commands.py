import sys
from importlib import import_module

from click.testing import CliRunner

from bench.commands import _COMMANDS, bench

NAMES = ("decode", "overhead", "load", "graphs", "memory", "spec", "soak")


def test_the_group_lists_its_commands() -> None:
    result = CliRunner().invoke(bench, ["--help"])
    for name in NAMES:
        assert f"\n  {name} " in result.output


def test_every_command_is_where_the_group_looks_for_it() -> None:
    assert tuple(_COMMANDS) == NAMES
    for name, lazy in _COMMANDS.items():
        module, _, attribute = lazy.target.partition(":")
        import_module(module)
        assert getattr(sys.modules[module], attribute).name == name
