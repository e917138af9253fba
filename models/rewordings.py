"""Rewordings of the base model's actions that the adapters learn, and the stream of them.

The base answers an instruction with JSON. `spoken` says the same for a loudspeaker, `careful`
asks for a confirmation. Every other answer stays.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from models.conversations import (
    Conversation,
    Message,
    any_turn,
    mixed_names,
    random_home,
    random_system,
    record,
    render,
)
from models.domain import Context, Turn, likely
from models.speech.talk import speech_conversation
from models.splits import in_training
from models.stream import Batch, Row, padded

BASE: Final = Path(__file__).with_name("home")
ADAPTERS: Final = Path(__file__).with_name("home-adapters")

Step = dict[str, Any]
Rewording = Callable[[Sequence[Step]], str]


def spoken(steps: Sequence[Step]) -> str:
    """Return what is done, and to what, step by step."""
    return f"OK, {'; '.join(_said(*map(str, step.values())) for step in steps)}."


def careful(steps: Sequence[Step]) -> str:
    """Return a question whether that is to be done."""
    return f"Shall I {'; '.join(_said(*map(str, step.values())) for step in steps)}?"


def _said(action: str, *what: str) -> str:
    return f"{action.replace('_', ' ')}: {', '.join(what)}"


REWORDINGS: Final[dict[str, Rewording]] = {"spoken": spoken, "careful": careful}


def steps_of(answer: str) -> list[Step]:
    """Return the actions of an answer, none where it has none."""
    if not answer.startswith(('{"action"', '[{"action"')):
        return []
    found: Step | list[Step] = json.loads(answer)
    return found if isinstance(found, list) else [found]


def reworded(messages: Sequence[Message], rewording: Rewording) -> list[Message]:
    """Return the chat with every action of the assistant's said in the other way."""
    chat = []
    for message in messages:
        steps = steps_of(message["content"]) if message["role"] == "assistant" else []
        chat.append({**message, "content": rewording(steps)} if steps else message)
    return chat


ROWS: Final = 12
POOL: Final = 40
"""Batches that are made at a time, of rows of like length."""
_LONGEST: Final = 150
_OTHERS: Final = 0.5
_SPEECH: Final = 0.3


def _kept(rng: Random, turn: Turn) -> bool:
    """Whatever the adapter changes; of the rest, which stays, half, and no stories."""
    if not steps_of(turn.answer) and (len(turn.answer) > _LONGEST or not likely(rng, _OTHERS)):
        return False
    return in_training(turn)


def short_conversation(rng: Random) -> Conversation:
    """Return a conversation about few devices without held-out combinations."""
    devices = random_home(rng, rng.randrange(1, 5), mixed_names(rng))
    context = Context(devices, listed=likely(rng, 0.9))
    system = random_system(rng, context)
    turns = []
    for _ in range(rng.randrange(3, 7)):
        turn = any_turn(rng, context, partial(_kept, rng))
        record(turn, context)
        turns.append(turn)
    return Conversation(system, tuple(turns))


def _conversation(rng: Random) -> Conversation:
    if likely(rng, _SPEECH):
        return speech_conversation(rng, in_training)
    return short_conversation(rng)


def adapter_batches(tokenizer: Tokenizer, rewording: Rewording, seed: int) -> Iterator[Batch]:
    """Yield batches of conversations of like length whose actions are reworded."""
    rng = Random(seed)
    while True:
        made = [_conversation(rng) for _ in range(ROWS * POOL)]
        texts = [render(reworded(one.messages(), rewording)) for one in made]
        rows = [
            Row(np.array(code.ids, dtype=np.int64), one.foreign())
            for code, one in zip(tokenizer.encode_batch(texts), made, strict=True)
        ]
        rows.sort(key=lambda row: len(row.ids))
        parts = [rows[begin : begin + ROWS] for begin in range(0, len(rows), ROWS)]
        rng.shuffle(parts)
        yield from (padded(part, tokenizer) for part in parts)
