"""`hearth demo`: two questions at once to the shipped model, and two about a picture."""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from shutil import which

import click
import PIL.Image
from rich.color import Color
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.style import Style
from rich.text import Text

from hearth.daemon.cli.console import out, printable, progress_bar
from hearth.daemon.cli.errors import Failure
from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.shipped import engine_folder, vision_engine_folder
from hearth.daemon.shipped_files import EXAMPLE_HOME, home_format
from hearth.runtime.grammar import available
from hearth.runtime.packages import pip_install
from hearth_client import Client, Image
from hearth_client.errors import HearthClientError

_COLUMNS = 48


def half_blocks(path: Path, columns: int) -> Text:
    """The picture so many columns wide: upper half blocks over backgrounds in 24 bit colours."""
    with PIL.Image.open(path) as image:
        rows = max(1, round(columns * image.height / image.width / 2))
        small = image.convert("RGB").resize((columns, 2 * rows), PIL.Image.Resampling.BOX)
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


_REFRESH_S = 0.03
_LINE = 48
_COLOURS = ("cyan", "magenta", "yellow", "green")


class Reply:
    """One reply as it arrives; written by one thread and shown by another."""

    def __init__(self, question: str) -> None:
        self.question = question
        self.text = ""
        self.tokens = 0
        self._began = time.monotonic()
        self._first = 0.0
        self._last = 0.0

    def add(self, text: str, tokens: int) -> None:
        """Take in one delta."""
        self._last = time.monotonic()
        self._first = self._first or self._last
        self.tokens += tokens
        self.text += printable(text)

    @property
    def age_s(self) -> float:
        """Seconds from the question to the newest delta."""
        return max(0.0, self._last - self._began)

    def figures(self) -> str:
        """Time to the first token, and tokens per second after it."""
        if not self._first:
            return "waiting"
        text = f"{self.tokens} tokens, first after {(self._first - self._began) * 1000:.0f} ms"
        seconds = self._last - self._first
        return f"{text}, {(self.tokens - 1) / seconds:.0f} tokens/s" if seconds > 0 else text


def show(screen: Console, replies: Sequence[Reply], finished: Callable[[], bool]) -> None:
    """Show the replies side by side until all are finished; line by line off a terminal."""
    if screen.is_terminal:
        _show_panels(screen, replies, finished)
    else:
        _show_lines(screen, replies, finished)


def _show_panels(screen: Console, replies: Sequence[Reply], finished: Callable[[], bool]) -> None:
    with Live(console=screen, auto_refresh=False) as live:
        done = False
        while not done:
            done = finished()
            width = max(24, screen.width // len(replies) - 1)
            panels = [_panel(i, reply, width) for i, reply in enumerate(replies)]
            live.update(Columns(panels), refresh=True)
            time.sleep(_REFRESH_S)


def _panel(index: int, reply: Reply, width: int) -> Panel:
    return Panel(
        Text.assemble((f"{reply.question}\n\n", "dim"), reply.text),
        width=width,
        border_style=_COLOURS[index % len(_COLOURS)],
        subtitle=reply.figures(),
        subtitle_align="left",
    )


def _show_lines(screen: Console, replies: Sequence[Reply], finished: Callable[[], bool]) -> None:
    shown = [0] * len(replies)
    done = False
    for index, reply in enumerate(replies, 1):
        screen.print(f"{index} asks: {reply.question}", markup=False)
    while not done:
        done = finished()
        for index, reply in enumerate(replies):
            part = reply.text[shown[index] :]
            if len(part) >= _LINE or (done and part):
                screen.print(f"{index + 1} {reply.age_s:6.3f} s  {part}", markup=False)
                shown[index] += len(part)
        time.sleep(_REFRESH_S)
    for index, reply in enumerate(replies, 1):
        screen.print(f"{index} done: {reply.figures()}", markup=False)


QUESTIONS = ("good night", "list all devices")
PICTURE = Path(__file__).with_name("scene.jpg")
ABOUT_THE_PICTURE = ("What is left of the star?", "Turn on the device at the bottom right")
_LONGEST = 48


@click.command()
def demo() -> None:
    """Serve the models that ship with Hearth, ask them about a home and a picture, and stop."""
    run_demo(out())


def run_demo(screen: Console) -> None:
    """Build, start, ask, show and stop; raises Failure when a part of it fails."""
    with progress_bar() as progress:
        folder = engine_folder("", progress)
        seeing = vision_engine_folder(progress)
    _serve(screen, folder, ask_at_once)
    _serve(screen, seeing, ask_about_the_picture)
    program = "hearth" if which("hearth") else sys.argv[0]
    steps = f"next: {program} serve\n      {program} chat   in a second terminal"
    screen.print(steps, style="dim", markup=False)


def _serve(screen: Console, folder: Path, ask: Callable[[Console, Path], None]) -> None:
    began = time.monotonic()
    with own_daemon(folder) as daemon:
        screen.print(f"[green]ready[/] in {time.monotonic() - began:.1f} s, engine {folder}")
        ask(screen, daemon.socket)
        began = time.monotonic()
        daemon.stop()
    screen.print(f"[green]stopped[/] cleanly in {time.monotonic() - began:.1f} s")


def ask_about_the_picture(screen: Console, socket: Path) -> None:
    """Show the picture, and what the vision variant answers about it."""
    show_picture(screen, PICTURE)
    with Client(socket) as client:
        for question in ABOUT_THE_PICTURE:
            began = time.monotonic()
            turns = [{"role": "user", "content": [Image(PICTURE), question]}]
            try:
                answer = client.generate(messages=turns, max_tokens=_LONGEST).text()
            except HearthClientError as error:
                raise Failure(f"a question got no reply: {error}") from error
            text = f"{question}\n  {printable(answer)}  ({time.monotonic() - began:.3f} s)"
            screen.print(text, markup=False)


def ask_at_once(screen: Console, socket: Path) -> None:
    """Ask all questions, each by a client of its own, and show the replies as they arrive."""
    replies = [Reply(question) for question in QUESTIONS]
    if not available():
        told = f"replies may name devices that are not in the list: {pip_install('grammar')}"
        screen.print(told, style="dim", markup=False)
    with ThreadPoolExecutor(len(replies)) as pool:
        asked = [pool.submit(_ask, socket, reply) for reply in replies]
        show(screen, replies, lambda: all(one.done() for one in asked))
    for one in asked:
        _raise_failure(one)


def _ask(socket: Path, reply: Reply) -> None:
    turns = [
        {"role": "system", "content": EXAMPLE_HOME},
        {"role": "user", "content": reply.question},
    ]
    form = home_format(EXAMPLE_HOME) if available() else None
    with Client(socket) as client:
        for delta in client.generate(messages=turns, response_format=form):
            reply.add(delta.text, len(delta.tokens))


def _raise_failure(asked: Future[None]) -> None:
    error = asked.exception()
    if isinstance(error, HearthClientError):
        raise Failure(f"a question got no reply: {error}") from error
    if error is not None:
        raise error
