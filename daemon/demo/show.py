"""`hearth demo`: two questions at once to the shipped model, and two about a picture."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from shutil import which

import click
from hearth_client import Client, Image
from hearth_client.errors import HearthClientError
from rich.console import Console

from daemon.cli.console import out, printable, progress_bar
from daemon.cli.errors import Failure
from daemon.demo.picture import show_picture
from daemon.demo.view import Reply, show
from daemon.example_home import EXAMPLE_HOME
from daemon.own_daemon import own_daemon
from daemon.shipped import engine_folder, vision_engine_folder

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
    steps = f"next: {program} serve\n      {program} chat --example   in a second terminal"
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
    with Client(socket) as client:
        for delta in client.generate(messages=turns):
            reply.add(delta.text, len(delta.tokens))


def _raise_failure(asked: Future[None]) -> None:
    error = asked.exception()
    if isinstance(error, HearthClientError):
        raise Failure(f"a question got no reply: {error}") from error
    if error is not None:
        raise error
