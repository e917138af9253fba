"""How the demo shows several replies that arrive at the same time."""

import time
from collections.abc import Callable, Sequence

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from daemon.cli.console import printable

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
