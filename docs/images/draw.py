"""Draw the pictures of docs/operations.md: `python docs/images/draw.py`, in the environment.

It starts a daemon on a simulated engine, puts load on it and draws what `hearth top` and
`hearth trace` show of it.
"""

import random
import re
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

from rich.console import CONSOLE_SVG_FORMAT, Console, RenderableType

from hearth.bench.toy_daemon import given_or_toy, simulated_flags
from hearth.daemon.cli.top.view import Board, rates, view
from hearth.daemon.cli.trace import waterfall
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Top, TopReport, Trace, TraceReport
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth_client import Client, HearthClientError

HERE = Path(__file__).parent
NAMES = ("kiosk", "robot in the kitchen", "hearth-chat", "home hub", "door camera")
LOAD_S = 8.0
# Its fonts lie elsewhere; the browser's own do.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def main() -> None:
    """Draw both pictures beside this file."""
    with given_or_toy() as engine, own_daemon(engine, simulated_flags(20, 100)) as daemon:
        clients = [Thread(target=ask_for_text, args=(daemon, name)) for name in NAMES]
        for client in clients:
            client.start()
        time.sleep(LOAD_S / 2)
        before = ask(Top(), TopReport, str(daemon.socket))
        time.sleep(1)
        now = ask(Top(), TopReport, str(daemon.socket))
        chosen = Board(chosen=now.requests[1].request)
        draw("top", "hearth top", view(now, chosen, rates(before, now), 28), 90)
        for client in clients:
            client.join()
        ended = ask(Trace(last=1000), TraceReport, str(daemon.socket)).requests
        shown = max((one for one in ended if not one.failed), key=lambda one: one.queue_s)
        draw("trace", f"hearth trace {shown.request}", waterfall(shown), 90)


def ask_for_text(daemon: OwnDaemon, name: str) -> None:
    """Be a client that has up to four requests open at a time."""
    chance = random.Random(name)
    end = time.monotonic() + LOAD_S
    with Client(daemon.socket, name=name) as client:
        while time.monotonic() < end:
            asked = [
                client.generate(
                    "x" * chance.randrange(20, 400),
                    max_tokens=chance.randrange(10, 150),
                    deadline_s=chance.choice([None, None, None, 2.0]),
                )
                for _ in range(chance.randrange(1, 5))
            ]
            for generation in asked:
                with suppress(HearthClientError):
                    generation.text()


def draw(name: str, title: str, picture: RenderableType, width: int) -> None:
    """Save what a terminal of that width shows as `<name>.svg`."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True)
        console.print(picture)
        console.save_svg(str(HERE / f"{name}.svg"), title=title, code_format=FORMAT)


if __name__ == "__main__":
    main()
