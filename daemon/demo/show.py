"""`make demo`: two questions at the same time to the shipped model, from start to clean stop."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from hearth_client import Client
from hearth_client.errors import HearthClientError
from rich.console import Console

from daemon.cli.console import out, progress_bar
from daemon.cli.errors import Failure, run_and_exit
from daemon.demo.view import Reply, show
from daemon.example_home import EXAMPLE_HOME
from daemon.own_daemon import own_daemon
from daemon.shipped import engine_folder

QUESTIONS = ("good night", "list all devices")


def main() -> NoReturn:
    """Run the demo and exit: 0 when all went well, else as `hearth` does."""
    run_and_exit(lambda: run_demo(out()))


def run_demo(screen: Console) -> None:
    """Build, start, ask, show and stop; raises Failure when a part of it fails."""
    with progress_bar() as progress:
        folder = engine_folder("", progress)
    began = time.monotonic()
    with own_daemon(folder) as daemon:
        screen.print(f"[green]ready[/] in {time.monotonic() - began:.1f} s, engine {folder}")
        ask_at_once(screen, daemon.socket)
        began = time.monotonic()
        daemon.stop()
    screen.print(f"[green]stopped[/] cleanly in {time.monotonic() - began:.1f} s")
    screen.print("[dim]next: .venv/bin/hearth serve")
    screen.print("[dim]      .venv/bin/hearth chat --example   in a second terminal")


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
