"""The prompts of `bench spec`: what the shipped model was not trained on."""

import subprocess
import sys

import msgspec

from daemon.shipped import SOURCE
from runtime.errors import HearthError
from runtime.text import Tokenizer

_PROGRAM = ("-m", "models.prompts")


class Turn(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True):
    """A conversation that ends with a question, and the kind of question."""

    group: str
    messages: list[Turn]


def held_out_prompts(count: int) -> list[Prompt]:
    """`count` prompts, spread evenly over all that are held out; raises `invalid_value`.

    They are made by the program that makes the training data, which lies beside the shipped model.
    """
    command, folder = [sys.executable, *_PROGRAM], SOURCE.parents[1]
    try:
        done = subprocess.run(command, capture_output=True, check=True, cwd=folder)  # noqa: S603 - fixed
    except (OSError, subprocess.CalledProcessError) as error:
        raise HearthError(
            "invalid_value", f"there are no prompts at {SOURCE.parent}: run it in the repository"
        ) from error
    return spread(msgspec.json.Decoder(Prompt).decode_lines(done.stdout), count)


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` of the prompts at even distances; all of them where there are fewer."""
    count = min(count, len(prompts))
    return [prompts[place * len(prompts) // count] for place in range(count)]


def encode_prompts(prompts: list[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each prompt with the chat template."""
    return [
        tokenizer.encode_chat([(turn.role, turn.content) for turn in prompt.messages])
        for prompt in prompts
    ]
