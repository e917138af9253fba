"""The command `hearth chat`: a conversation, and the lines that steer it."""

import readline
import shlex
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Any, Literal

import click

from hearth.daemon.cli.clients import connected
from hearth.daemon.cli.console import Lines, err, out, printable
from hearth.daemon.cli.errors import FAILED, Failure, wrong_usage
from hearth.daemon.cli.options import adapter_option, key_option, socket_option, speculation_option
from hearth.daemon.shipped_files import EXAMPLE_HOME, shipped_picture
from hearth.runtime.request import RequestOptions, check_options
from hearth_client import (
    CapacityExceeded,
    Client,
    Done,
    Generation,
    HearthClientError,
    Image,
    MessageTooLarge,
    PromptTooLong,
)
from hearth_client.protocol import MAX_MESSAGES, Limits

Turn = dict[str, Any]
Action = Literal["say", "show", "refuse", "leave"]

HELP = """/system TEXT  set the system message and start again; - for none
/system       show it
/image PATH   show a picture with the next message; - for none
/reset        forget the conversation
/stats        what the last reply took
/help         this list
/exit         leave, as Ctrl-D does
Ctrl-C cancels a reply."""


_NO_PICTURES = (
    "this model takes no pictures: serve one that does, such as the one that ships with Hearth, by "
    "hearth export home-vision DIR and hearth serve --engine DIR"
)
_RESERVE = 16
"""One part in so many of a request's tokens is reserved for the next question and its reply."""


class Conversation:
    """The turns so far; a system message, when there is one, comes first.

    Questions and replies alternate. `limits` are the daemon's; `stats` is shown by `/stats`.
    """

    def __init__(self, system: str | None = None, limits: Limits | None = None) -> None:
        self.limits = limits
        self.stats = "nothing has been answered yet"
        self._system = system
        self._turns: list[Turn] = []
        self._images: list[Image] = []
        self._tokens = 0

    @property
    def images(self) -> int:
        """Number of pictures that go with the next message, also where one has failed."""
        return len(self._images)

    def messages(self, text: str) -> list[Turn]:
        """All turns with `text` as the user's next one."""
        first = [_turn("system", self._system)] if self._system else []
        return [*first, *self._turns, self._asked(text)]

    def add(self, text: str, reply: str, tokens: int = 0) -> None:
        """Remember what was said; a cancelled reply counts as far as it came.

        All of it together has `tokens`. Of a reply that has no text nothing is remembered: no
        daemon takes an empty turn.
        """
        if reply:
            self._turns += [self._asked(text), _turn("assistant", reply)]
            self._tokens = tokens
        self._images.clear()

    @property
    def turns(self) -> list[Turn]:
        """Turns so far, to be put back when a message turns out too long by itself."""
        return [*self._turns]

    @turns.setter
    def turns(self, turns: list[Turn]) -> None:
        self._turns = turns

    def crowded(self) -> bool:
        """True if the oldest turns have to be dropped before another message can be answered."""
        if self.limits is None or not self._turns:
            return False
        asked, pictures = len(self._turns) // 2, [*_pictures(self._turns), *self._images]
        return (
            len(self.messages("")) > MAX_MESSAGES
            or (asked > 1 and self._tokens * _RESERVE > self.limits.total_tokens * (_RESERVE - 1))
            or (len(pictures) > self.limits.images and len(pictures) > len(self._images))
            or sum(len(one.frame) for one in pictures) > self.limits.request_image_bytes > 0
        )

    def shorten(self) -> int:
        """Forget the oldest quarter of the questions and their replies; returns how many."""
        asked = len(self._turns) // 2
        gone = min(asked, max(1, asked // 4))
        del self._turns[: 2 * gone]
        self._tokens = 0
        return gone

    def command(self, line: str) -> tuple[Action, str]:
        """Parse a line: text to send, text to show, or a request to leave."""
        word, _, rest = line.strip().partition(" ")
        if not word.startswith("/"):
            return "say", line
        return self._steer(word, rest.strip())

    def _steer(self, word: str, rest: str) -> tuple[Action, str]:
        match word:
            case "/exit" | "/quit":
                return "leave", ""
            case "/help" | "/stats":
                return "show", HELP if word == "/help" else self.stats
            case "/image":
                return self._show_image(rest)
            case "/reset":
                self._turns.clear()
                self._images.clear()
                return "show", "the conversation is forgotten"
            case "/system":
                return "show", self._set_system(rest)
        return "show", f"there is no command {word}: /help lists them"

    def _set_system(self, text: str) -> str:
        if text:
            self._turns.clear()
            self._system = None if text == "-" else text
            return "the system message is set" if self._system else "there is none now"
        return self._system or "there is no system message"

    def _asked(self, text: str) -> Turn:
        return {"role": "user", "content": [*self._images, text] if self._images else text}

    def _show_image(self, path: str) -> tuple[Action, str]:
        if path == "-":
            self._images.clear()
        elif self.limits is not None and not self.limits.images:
            return "refuse", _NO_PICTURES
        elif path:
            try:
                self._images.append(Image(_path_of(path)))
            except OSError as error:
                return "refuse", f"{path} cannot be read: {error.strerror}"
            except HearthClientError as error:
                return "refuse", f"{path}: {error.message}"
        return "show", f"pictures for the next message: {self.images}"


def _path_of(text: str) -> Path:
    """The file that is meant: a terminal quotes the name of one that is dropped on it."""
    path = Path(text).expanduser()
    if not path.exists():
        with suppress(ValueError):
            words = shlex.split(text)
            path = Path(words[0]).expanduser() if len(words) == 1 else path
    return shipped_picture(path)


def _pictures(turns: list[Turn]) -> list[Image]:
    return [
        part
        for turn in turns
        if isinstance(turn["content"], list)
        for part in turn["content"]
        if isinstance(part, Image)
    ]


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


_TOO_LONG = (PromptTooLong, CapacityExceeded, MessageTooLarge)
# Text between \001 and \002 takes no columns on the screen: readline counts columns.
_PATIENCE_S = 1.5
"""Seconds without a first token after which the user is told that the reply waits."""
_PLAIN_PROMPT = "you> "
_PROMPT = "\001\033[36m\002you>\001\033[0m\002 "


@click.command()
@socket_option
@key_option
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--example", is_flag=True, help="Take an example home as the system message.")
@click.option("--max-tokens", type=click.IntRange(1, 1 << 20), help="Default: what fits.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, help="Same seed, same text.")
@speculation_option
@adapter_option
def chat(
    socket: str | None, key: str | None, *, system: str | None, example: bool, **options: Any
) -> int:
    """Talk to a running daemon.

    Ctrl-C cancels a reply, Ctrl-D leaves, /help lists the commands. Nothing that is said is kept
    on disk. What comes from a file or a pipe is answered line by line, and the exit code is 1
    when a line had no answer.
    """
    if example and system is not None:
        raise click.UsageError("--example and --system exclude each other")
    with wrong_usage():
        check_options(RequestOptions(**options))
    typed = sys.stdin.isatty()
    # A user at a terminal sees what is waited for, and can leave; a program gets an error at once.
    with connected(socket, key, name="hearth-chat", wait=typed) as client:
        conversation = Conversation(EXAMPLE_HOME if example else system, client.connect().limits)
        if typed:
            readline.parse_and_bind("set enable-bracketed-paste on")
            _greet(client, example=example)
        answered = _converse(client, conversation, options)
    # Who types has seen the refusal and gone on; a program has only the code.
    return 0 if answered or typed else FAILED


def _converse(client: Client, conversation: Conversation, options: dict[str, Any]) -> bool:
    """Talk until the user leaves; tells whether every line had an answer."""
    answered = True
    for line in _lines():
        action, text = conversation.command(line)
        if action == "leave":
            break
        if action in {"show", "refuse"}:
            style, screen = ("dim" if action == "show" else "red"), err()
            screen.print(text, style=style, markup=False, soft_wrap=not screen.is_terminal)
            answered = answered and action == "show"
        elif text.strip():
            answered = _answer(client, conversation, text, options) and answered
    return answered


def _greet(client: Client, *, example: bool) -> None:
    model = client.connect().model
    err().print(f"{model}, /help lists the commands", style="dim", markup=False)
    if example:
        err().print(EXAMPLE_HOME, style="dim", markup=False)


def _lines() -> Iterator[str]:
    """Lines that the user types, until Ctrl-D or the end of the input."""
    prompt = _prompt() if sys.stdin.isatty() else ""
    while (line := _ask(prompt)) is not None:
        yield line


def _prompt() -> str:
    screen = out()
    return _PROMPT if screen.is_terminal and not screen.no_color else _PLAIN_PROMPT


def _ask(prompt: str) -> str | None:
    try:
        line = input(prompt)
        line.encode()  # In some locales what is no text is let through in disguise.
    except EOFError:
        return None
    except KeyboardInterrupt:
        err().print("\n[dim]Ctrl-D leaves[/]")
        return ""
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise Failure(f"the input is not {error.encoding} text: convert it first") from error
    return line


def _answer(client: Client, conversation: Conversation, text: str, options: dict[str, Any]) -> bool:
    before, gone = conversation.turns, 0
    while conversation.crowded():
        gone += conversation.shorten()
    while True:
        try:
            _reply(client, conversation, text, options)
        except HearthClientError as error:
            less = conversation.shorten() if isinstance(error, _TOO_LONG) else 0
            gone += less
            if less:
                continue
            conversation.turns = before
            err().print(str(error), style="red", markup=False)
            err().print("[dim]what you said is not remembered: say it again if need be[/]")
            if conversation.images:
                err().print("[dim]the pictures stay for the next message, /image - forgets them[/]")
            return False
        break
    if gone:
        asked = f"{gone} questions and their replies" if gone > 1 else "question and its reply"
        err().print(f"[dim]it got too long: the first {asked} are forgotten, /reset forgets all[/]")
    return True


def _reply(client: Client, conversation: Conversation, text: str, options: dict[str, Any]) -> None:
    began = time.monotonic()
    with _keys_kept_back(), _waiting_shown() as told:
        generation = client.generate(messages=conversation.messages(text), **options)
        with _interrupt_cancels(generation):
            first = _stream(generation, told)
    done = generation.result()
    conversation.stats = _stats(generation, done)
    with suppress(HearthClientError):  # A daemon that came back may have others.
        conversation.limits = client.connect().limits
    tokens = done.usage.prompt_tokens + done.usage.completion_tokens
    conversation.add(text, generation.text(), tokens)
    err().print(f"[dim]{_figures(done, began, first)}[/]")


def _stream(generation: Generation, told: Timer) -> float:
    """Print the reply as it arrives; returns when its first part came."""
    first, screen = 0.0, out()
    lines = Lines(screen.width) if screen.is_terminal else None
    try:
        for delta in generation:
            told.cancel()
            first = first or time.monotonic()
            text = printable(delta.text)
            screen.print(lines.feed(text) if lines else text, end="", markup=False)
            sys.stdout.flush()
    except HearthClientError:
        if first:  # What is said next is no part of the reply.
            screen.print(lines.rest() if lines else "", markup=False)
        raise
    screen.print(lines.rest() if lines else "", markup=False)
    return first or time.monotonic()


@contextmanager
def _waiting_shown() -> Iterator[Timer]:
    """Say that the daemon is waited for, unless the timer is cancelled before."""
    words = ("waiting for the daemon",)
    timer = Timer(_PATIENCE_S, err().print, words, {"style": "dim"})
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


@contextmanager
def _keys_kept_back() -> Iterator[None]:
    """Keys that are typed meanwhile wait for the next prompt: shown, they were in the reply."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextmanager
def _interrupt_cancels(generation: Generation) -> Iterator[None]:
    """The first Ctrl-C asks the daemon to end the reply; a second one does not wait for it."""

    def cancel(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        generation.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _figures(done: Done, began: float, first: float) -> str:
    tokens = done.usage.completion_tokens
    ended = {"cancelled": "cancelled, ", "length": "cut at "}.get(done.reason, "")
    seconds = max(time.monotonic() - began, 1e-9)
    if not tokens:
        return f"{ended}0 tokens"
    speed = f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.0f} tokens/s)"
    return f"{ended}{speed}, the first after {(first - began) * 1000:.0f} ms"


def _stats(generation: Generation, done: Done) -> str:
    used = done.usage
    known = f", {used.cached_tokens} of them known before" if used.cached_tokens else ""
    told = [
        f"request  {generation.request}: hearth trace shows where its time went",
        f"prompt   {used.prompt_tokens} tokens{known}",
        f"reply    {used.completion_tokens} tokens, ended by {done.reason}",
        f"waited   {used.queue_ms:.0f} ms for a place",
        f"read     the prompt in {used.prefill_ms:.0f} ms",
        f"wrote    the reply in {used.decode_ms:.0f} ms",
    ]
    if done.speculation is not None:
        told.append(f"a round  gave {done.speculation.accept_length:.1f} tokens (speculation)")
    if done.images is not None:
        told.append(f"pictures were {done.images.tokens} tokens")
    return "\n".join(told)
