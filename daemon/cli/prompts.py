"""Prompts as users give them: text, token ids, lines of a file or of standard input."""

import sys
from collections.abc import Sequence
from typing import TextIO

import click

from daemon.cli.errors import Failure
from runtime.text import Tokenizer

Prompt = str | list[int]


def parse_ids(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> tuple[list[int], ...]:
    """Token ids from values like `1,2,3`; a callback of an option."""
    return tuple(_ids(value) for value in values)


def _ids(value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list of token ids like 1,2,3") from error


def read_prompts(
    texts: Sequence[str], ids: Sequence[list[int]], file: TextIO | None
) -> list[Prompt]:
    """All prompts in the order texts, ids, file; standard input when none of them is given."""
    prompts: list[Prompt] = [*texts, *ids]
    if file is None and not prompts:
        if sys.stdin.isatty():
            raise click.UsageError("there is no prompt: give --prompt, --ids, --file or a pipe")
        file = sys.stdin
    if file is not None:
        prompts += _lines(file)
    if not prompts:
        raise click.UsageError("there is no prompt: the input is empty")
    return prompts


def _lines(file: TextIO) -> list[str]:
    try:
        lines = [line.rstrip("\r\n") for line in file if line.strip()]
        "".join(lines).encode()  # In some locales what is no text is let through in disguise.
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise Failure(f"{file.name} is not {error.encoding} text: convert it first") from error
    return lines


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, *, chat: bool, system: str | None
) -> list[int]:
    """Token ids of a prompt; with `chat` it is the user's message after the system message."""
    if not isinstance(prompt, str):
        return prompt
    if not chat:
        return tokenizer.encode(prompt)
    turns = [("system", system)] if system is not None else []
    return tokenizer.encode_chat([*turns, ("user", prompt)])
