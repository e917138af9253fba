"""Whole conversations, as messages and as ChatML text."""

from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from models.chances import likely, weighted
from models.domain import Context, Turn
from models.homes import HEADS, PLAIN, mixed_names, random_home, system_prompt
from models.turns import Allowed, any_turn, record

_SIZES: Final = {
    "short": (range(2, 14), range(2, 9)),
    "long": (range(10, 25), range(4, 12)),
    "longest": (range(16, 49), range(8, 25)),
}


Message = dict[str, str]


class Conversation(NamedTuple):
    """A system prompt, which may be empty, and the turns that follow it."""

    system: str
    turns: tuple[Turn, ...]

    def messages(self) -> list[Message]:
        """Return the chat with all of its answers."""
        chat: list[Message] = []
        if self.system:
            chat.append({"role": "system", "content": self.system})
        for turn in self.turns:
            chat.append({"role": "user", "content": turn.user})
            chat.append({"role": "assistant", "content": turn.answer})
        return chat


def render(messages: Sequence[Message], *, prompt: bool = False) -> str:
    """Return the ChatML text that the chat template makes of these messages."""
    parts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join([*parts, "<|im_start|>assistant\n"] if prompt else parts)


def _sizes(rng: Random) -> tuple[int, int]:
    size = weighted(rng, {"short": 0.88, "long": 0.1, "longest": 0.02})
    devices, turns = _SIZES[size]
    return rng.choice(devices), rng.choice(turns)


def random_system(rng: Random, context: Context) -> str:
    """Return a system prompt: with the list, or for an unlisted home plain or empty."""
    if context.listed:
        return system_prompt(rng.choice(HEADS), context.devices)
    return "" if likely(rng, 0.6) else rng.choice(PLAIN)


def random_conversation(rng: Random, allowed: Allowed) -> Conversation:
    """Return a conversation all of whose turns the caller allows."""
    count, length = _sizes(rng)
    devices = random_home(rng, count, mixed_names(rng))
    context = Context(devices, listed=likely(rng, 0.88))
    system = random_system(rng, context)
    turns = []
    for _ in range(length):
        turn = any_turn(rng, context, allowed)
        record(turn, context)
        turns.append(turn)
    return Conversation(system, tuple(turns))
