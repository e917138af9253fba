import sys
from importlib import import_module

import pytest
from click.testing import CliRunner

from hearth.bench.__main__ import _COMMANDS, bench

NAMES = ("decode", "overhead", "load", "memory", "spec", "prefix", "lora", "vision")


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


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, f"make system ROW={name}") for name in ("faults", "overload", "soak")),
        *((name, f"python -m tools.{name}") for name in ("widths", "graphs")),
    ],
)
def test_what_moved_names_its_new_place(name: str, place: str) -> None:
    result = CliRunner().invoke(bench, [name, "--json"])
    assert result.exit_code == 2
    assert f"it is `{place}` in the repository" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("overhead", "--step-ms", "nan"),
        ("overhead", "--step-ms", "60001"),
        ("spec", "--tree", "4,3,160"),
    ],
)
def test_what_nothing_takes_is_wrong_usage(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in ("overhead.given_or_toy", "spec.command.engine_folder"):
        monkeypatch.setattr(f"hearth.bench.{work}", pytest.fail)
    assert CliRunner().invoke(bench, arguments).exit_code == 2
