import io
from pathlib import Path

from PIL import Image
from rich.console import Console

from hearth.daemon.demo.show import half_blocks, show_picture


def _flag(folder: Path) -> Path:
    image = Image.new("RGB", (8, 8), (255, 0, 0))
    image.paste((0, 0, 255), (0, 4, 8, 8))
    path = folder / "flag.png"
    image.save(path)
    return path


def test_a_character_shows_one_pixel_above_another(tmp_path: Path) -> None:
    text = half_blocks(_flag(tmp_path), 2)
    assert text.plain == "▀▀\n"
    style = text.spans[0].style
    assert str(style) == "#ff0000 on #0000ff"


def test_without_colours_the_file_is_named(tmp_path: Path) -> None:
    for system in (None, "truecolor"):
        stream = io.StringIO()
        show_picture(
            Console(file=stream, color_system=system, force_terminal=bool(system)), _flag(tmp_path)
        )
        assert ("▀" in stream.getvalue()) == bool(system)
        assert (str(_flag(tmp_path)) in stream.getvalue().replace("\n", "")) != bool(system)
