"""Random schedules, each row beside itself alone.

`python -m tests.runtime.generation.schedules` runs as many as one likes.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
import msgspec

from hearth.runtime.config import load_config
from tests.runtime.generation.schedules.campaign import ALONE, Campaign, Figures, Folders
from tests.runtime.generation.schedules.home import export_home, settings_of

EXPORTS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"native": {"dialect": "native"}, "classic": {"dialect": "classic"}},
    "cuda": {
        "kernels-float16": {"backend": "kernels", "device": "cuda", "dtype": "float16"},
        "kernels-bfloat16": {"backend": "kernels", "device": "cuda", "dtype": "bfloat16"},
        "float32": {"backend": "onnxruntime", "device": "cuda"},
        "float16": {"backend": "onnxruntime", "device": "cuda", "dtype": "float16"},
    },
}


@click.command()
@click.option("--count", default=50, show_default=True, help="Schedules for each engine.")
@click.option("--first", default=0, help="The number of the first schedule.")
@click.option("--engine", default="", metavar="DIR", help="An engine folder.  [the shipped model]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the output.")
def main(*, count: int, first: int, engine: str, device: str, as_json: bool) -> None:
    """Compare each row of random schedules with itself alone; exits with 1 where one differs."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, folders in _engines(engine, device, Path(scratch)).items():
            started = time.monotonic()
            figures = _figures(folders, range(first, first + count))
            found[name] = {**msgspec.to_builtins(figures), "seconds": time.monotonic() - started}
            click.echo(f"{name}: {count} schedules, {len(figures.failures)} failures", err=True)
    wanted = found if as_json else {name: one["failures"] for name, one in found.items()}
    click.echo(msgspec.json.format(msgspec.json.encode(wanted), indent=1))
    if any(one["failures"] for one in found.values()):
        sys.exit(1)


def _engines(engine: str, device: str, scratch: Path) -> dict[str, Folders]:
    """The folders of each engine, by the engine's name; one that is given has one chunk."""
    if engine:
        return {Path(engine).name: lambda _: Path(engine)}

    def exported(name: str) -> Folders:
        return cache(
            lambda chunk: export_home(scratch / f"{name}-{chunk}", chunk, **EXPORTS[device][name])
        )

    return {name: exported(name) for name in EXPORTS[device]}


def _figures(folders: Folders, numbers: Sequence[int]) -> Figures:
    campaign = Campaign(folders, settings_of(load_config(folders(ALONE.chunk))))
    try:
        for number in numbers:
            campaign.run(number)
    finally:
        campaign.close()
    return campaign.figures


if __name__ == "__main__":
    main()
