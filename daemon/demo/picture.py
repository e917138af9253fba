"""The picture of the demo in a terminal, two pixels a character."""

from pathlib import Path

from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

_COLUMNS = 48


def half_blocks(path: Path, columns: int) -> Text:
    """The picture so many columns wide: upper half blocks over backgrounds in 24 bit colours."""
    with Image.open(path) as image:
        rows = max(1, round(columns * image.height / image.width / 2))
        small = image.convert("RGB").resize((columns, 2 * rows), Image.Resampling.BOX)
    pixels = small.tobytes()
    width = 3 * columns
    text = Text()
    for row in range(rows):
        above = 2 * row * width
        for at in range(above, above + width, 3):
            upper = Color.from_rgb(*pixels[at : at + 3])
            lower = Color.from_rgb(*pixels[at + width : at + width + 3])
            text.append("▀", Style(color=upper, bgcolor=lower))
        text.append("\n")
    return text


def show_picture(screen: Console, path: Path) -> None:
    """Show it where there are colours to show it in, and name its file anywhere else."""
    if screen.color_system is None:
        screen.print(f"the picture is {path}", markup=False)
    else:
        screen.print(half_blocks(path, min(_COLUMNS, screen.width)), soft_wrap=True, end="")
