"""What several tests of the benches do: run a command, and hide a library."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from hearth.bench.__main__ import bench


def invoke(*arguments: str, command: click.Command = bench) -> Result:
    """All that a bench gives; raises what it raises."""
    return CliRunner().invoke(command, arguments, standalone_mode=False, catch_exceptions=False)


def run(*arguments: str, command: click.Command = bench) -> tuple[int | None, dict[str, Any]]:
    """The exit code of a bench and its figures."""
    result = invoke(*arguments, "--json", command=command)
    figures = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(figures, dict)
    return result.return_value, figures


def hide(folder: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module in the way that behaves as if `library` were absent, for child processes."""
    (folder / f"{library}.py").write_text(
        f"raise ModuleNotFoundError('hidden', name={library!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
