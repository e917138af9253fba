"""An endless seeded stream of batches for the training of an adapter."""

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from models.chances import likely
from models.conversations import Conversation, random_system, render
from models.domain import Context, Turn
from models.homes import mixed_names, random_home
from models.rewordings import Rewording, reworded, steps_of
from models.splits import in_training
from models.stream import Batch, padded
from models.turns import any_turn, record

ROWS: Final = 12
POOL: Final = 40
"""Batches that are made at a time, of rows of like length."""
_LONGEST: Final = 150
_OTHERS: Final = 0.5


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


def adapter_batches(tokenizer: Tokenizer, rewording: Rewording, seed: int) -> Iterator[Batch]:
    """Yield batches of conversations of like length whose actions are reworded."""
    rng = Random(seed)
    while True:
        chats = [short_conversation(rng).messages() for _ in range(ROWS * POOL)]
        texts = [render(reworded(chat, rewording)) for chat in chats]
        rows = [np.array(code.ids, dtype=np.int64) for code in tokenizer.encode_batch(texts)]
        rows.sort(key=len)
        parts = [rows[begin : begin + ROWS] for begin in range(0, len(rows), ROWS)]
        rng.shuffle(parts)
        yield from (padded(part, tokenizer) for part in parts)
