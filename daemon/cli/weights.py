import shlex
import time
from pathlib import Path

import click
from rich.markup import escape

from hearth.daemon.cli.console import err, progress_bar, size


@click.command()
@click.argument("source", metavar="MODEL_DIR", type=click.Path(path_type=Path))
@click.argument("target", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--engine",
    required=True,
    metavar="ENGINE_DIR",
    help="The engine folder that is to serve them: of kernels, or with --external-weights.",
)
def weights(source: Path, target: Path, engine: str) -> None:
    """Write the weights of the Hugging Face folder MODEL_DIR into FILE, for an engine folder.

    The model has the shape and the tokenizer of the engine's: a fine-tune of it, say. The engine
    folder stays as it is. A failed run leaves nothing behind.
    """
    from hearth.runtime.export.export import export_weights  # noqa: PLC0415 - slow import

    began = time.monotonic()
    with progress_bar() as progress:
        written = export_weights(source, Path(engine), target, progress)
    one, other = (escape(shlex.quote(str(path))) for path in (engine, target))
    err().print(
        f"[green]done[/] {size(written.nbytes)} in {time.monotonic() - began:.1f} s\n"
        f"[dim]next: hearth serve --engine {one} --weights {other}[/]"
    )
