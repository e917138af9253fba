"""The command `hearth chat`: a conversation, and the lines that steer it."""

import readline
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Timer
from types import FrameType
from typing import Any

import click

from hearth.daemon.cli.clients import connected
from hearth.daemon.cli.console import Lines, err, out, print_call, printable, printable_name
from hearth.daemon.cli.conversation import Conversation
from hearth.daemon.cli.errors import FAILED, Failure, wrong_usage
from hearth.daemon.cli.options import (
    adapter_option,
    key_option,
    sampling_options,
    schema_option,
    socket_option,
    speculation_option,
    template_option,
    tool_option,
)
from hearth.daemon.shipped_files import EXAMPLE_HOME, MODELS, home_format
from hearth.runtime.packages import pip_install
from hearth.runtime.request import RequestOptions, check_options
from hearth_client import (
    CapacityExceeded,
    Client,
    Done,
    Generation,
    HearthClientError,
    MessageTooLarge,
    PromptTooLong,
)

_SHIPPED = MODELS["home"].name
_TOO_LONG = (PromptTooLong, CapacityExceeded, MessageTooLarge)
_PATIENCE_S = 1.5
"""Seconds without a first token after which the user is told that the reply waits."""


@click.command()
@socket_option
@key_option
@click.option("--system", metavar="TEXT", help='The system message, "" for none.')
@click.option(
    "--example",
    is_flag=True,
    help="Take an example home as the system message; the shipped model has it by default.",
)
@click.option("--max-tokens", type=click.IntRange(1, 1 << 20), help="Default: what fits.")
@sampling_options
@click.option("--seed", type=int, help="Same seed, same text.")
@tool_option
@schema_option
@template_option
@speculation_option
@adapter_option
def chat(
    socket: str | None,
    key: str | None,
    *,
    system: str | None,
    example: bool,
    tools: list[dict[str, Any]],
    schema: Any,
    template: dict[str, Any],
    **options: Any,
) -> int:
    """Talk to a running daemon.

    Ctrl-C cancels a reply, Ctrl-D leaves, /help lists the commands. Nothing that is said is kept
    on disk. What comes from a file or a pipe is answered line by line, and the exit code is 1
    when a line had no answer. Where the model calls a tool of --tool, the next line is its result.

    Without --system, --tool and --schema the shipped model is told of an example home, and no
    action names a device that is not in it.
    """
    if example and system is not None:
        raise click.UsageError("--example and --system exclude each other")
    given = {name: value for name, value in options.items() if value is not None}
    with wrong_usage():
        check_options(RequestOptions(**given))
    given["speculation"] = options["speculation"]
    form = None if schema is None else {"type": "json_schema", "schema": schema}
    asked = {"tools": tools, "template": template, "response_format": form}
    given |= {name: value for name, value in asked.items() if value}
    typed = sys.stdin.isatty()
    # A user at a terminal sees what is waited for, and can leave; a program gets an error at once.
    with connected(socket, key, name="hearth-chat", wait=typed) as client:
        welcome = client.connect()
        if typed:
            readline.parse_and_bind("set enable-bracketed-paste on")
            err().print(f"{welcome.model}, /help lists the commands", style="dim", markup=False)
        own = bool(tools or form)
        at_home = example or (system is None and not own and welcome.model == _SHIPPED)
        if at_home and (typed or not example):
            _tell_of_home(whole=example)
        conversation = Conversation(
            EXAMPLE_HOME if at_home else system,
            welcome.limits,
            given,
            _home_form(client) if at_home and not own else None,
        )
        answered = _converse(client, conversation)
    # Who types has seen the refusal and gone on; a program has only the code.
    return 0 if answered or typed else FAILED


def _converse(client: Client, conversation: Conversation) -> bool:
    """Talk until the user leaves; tells whether every line had an answer."""
    answered = True
    for line in _lines(conversation):
        action, text = conversation.command(line)
        if action == "leave":
            break
        if action in {"show", "refuse"}:
            style, screen = ("dim" if action == "show" else "red"), err()
            screen.print(text, style=style, markup=False, soft_wrap=not screen.is_terminal)
            answered = answered and action == "show"
        elif action == "answer":
            conversation.answer(text)
            if not conversation.pending:
                answered = _answer(client, conversation, None) and answered
        elif text.strip():
            answered = _answer(client, conversation, text) and answered
    return answered


def _tell_of_home(*, whole: bool) -> None:
    if whole:
        err().print(EXAMPLE_HOME, style="dim", markup=False)
    else:
        told = "the model is told of an example home: /system shows it, /system - takes it away"
        err().print(told, style="dim", markup=False)


def _home_form(client: Client) -> dict[str, str] | None:
    """The form by which no action names a device that the example has not."""
    if "response_format" in client.connect().features:
        return home_format(EXAMPLE_HOME)
    install = pip_install("grammar")
    told = f"replies may name devices that are not in the list: where the daemon runs, {install}"
    err().print(told, style="dim", markup=False)
    return None


def _lines(conversation: Conversation) -> Iterator[str]:
    """Lines that the user types, until Ctrl-D or the end of the input."""
    typed = sys.stdin.isatty()
    while (line := _ask(_prompt(conversation) if typed else "")) is not None:
        yield line


def _prompt(conversation: Conversation) -> str:
    who = printable_name(conversation.pending[0].name) if conversation.pending else "you"
    screen = out()
    if not screen.is_terminal or screen.no_color:
        return f"{who}> "
    # Text between these two takes no columns on the screen: readline counts columns.
    return f"\001\033[36m\002{who}>\001\033[0m\002 "


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


def _answer(client: Client, conversation: Conversation, text: str | None) -> bool:
    """Ask for a reply to `text`, or to the results of calls; False where there was none."""
    before, gone = conversation.exchanges, 0
    while conversation.crowded():
        gone += conversation.shorten()
    while True:
        try:
            _reply(client, conversation, text)
        except HearthClientError as error:
            less = conversation.shorten() if isinstance(error, _TOO_LONG) else 0
            gone += less
            if less:
                continue
            conversation.exchanges = before
            if text is None:
                conversation.forget_last()
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


def _reply(client: Client, conversation: Conversation, text: str | None) -> None:
    began = time.monotonic()
    with _keys_kept_back(), _waiting_shown() as told:
        generation = client.generate(messages=conversation.messages(text), **conversation.request)
        with _interrupt_cancels(generation):
            first = _stream(generation, told)
    done = generation.result()
    conversation.stats = _stats(generation, done)
    with suppress(HearthClientError):  # A daemon that came back may have others.
        conversation.limits = client.connect().limits
    tokens = done.usage.prompt_tokens + done.usage.completion_tokens
    calls = generation.tool_calls
    conversation.add(text, generation.text(), tokens, generation.reasoning, calls)
    for call in calls:
        print_call(call.name, call.arguments)
    if generation.reasoning:
        words = len(generation.reasoning.split())
        err().print(f"[dim]it thought for {words} words, /reasoning shows them[/]")
    err().print(f"[dim]{_figures(done, began, first)}[/]")


def _stream(generation: Generation, told: Timer) -> float:
    """Print the reply as it arrives; returns when its first part came."""
    first, thinking, screen = 0.0, False, out()
    lines = Lines(screen.width) if screen.is_terminal else None
    try:
        for delta in generation:
            told.cancel()
            first = first or time.monotonic()
            if delta.reasoning and not thinking:
                thinking = True
                err().print("[dim]thinking ...[/]")
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
