"""The tokenizer, and an endless seeded stream of training batches, made while the model trains."""

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.conversations import Conversation, random_conversation, render
from models.domain import Turn, likely
from models.splits import in_training
from models.vocabulary import ROOMS

END_OF_TEXT: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
VOCABULARY: Final = 1024
CONVERSATIONS: Final = 4000

# A space is no part of a word, so that a name copied from the list into JSON keeps its tokens.
_PIECES: Final = r"\p{L}+|\p{N}|\n|[^\p{L}\p{N}\n]+"


def training_text(seed: int) -> Iterator[str]:
    """Yield the text of training conversations, without special tokens."""
    rng = Random(seed)
    for _ in range(CONVERSATIONS):
        text = render(random_conversation(rng, in_training).messages())
        yield text.replace(START, "").replace(END, "")


def train_tokenizer(seed: int) -> Tokenizer:
    """Return a tokenizer trained on generated conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(seed), trainer)
    return tokenizer


MAX_TOKENS: Final = 2048
POOL: Final = 512
ROUND: Final = 32

# What is soon learned is thinned out: to find the devices of a room takes the longest.
_OF_A_ROOM: Final = 1.0
_OF_THE_HOME: Final = 0.6
_OTHERS: Final = 0.3
_NAMELESS: Final = 0.2

Tokens = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """Token ids, right-padded, and which of them belong to an answer."""

    ids: Tokens
    answers: npt.NDArray[np.bool_]


def answer_mask(ids: Tokens, tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Return which tokens an assistant has to produce: its text and the end of its turn."""
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    header = [start, *tokenizer.encode("assistant\n").ids]
    mask = np.zeros(len(ids), dtype=np.bool_)
    ends = np.flatnonzero(ids == end)
    for begin in np.flatnonzero(ids == start):
        first = begin + len(header)
        if ids[begin:first].tolist() == header:
            stop = ends[np.searchsorted(ends, begin)]
            mask[first : stop + 1] = True
    return mask


def _share(turn: Turn) -> float:
    subject = turn.combination.device
    if not subject:
        return _NAMELESS
    if turn.group not in {"questions", "scenes"}:
        return _OTHERS
    return _OF_A_ROOM if subject in ROOMS else _OF_THE_HOME


def _kept(rng: Random, turn: Turn) -> bool:
    return likely(rng, _share(turn)) and in_training(turn)


def training_conversation(rng: Random) -> Conversation:
    """Return a conversation without held-out combinations, mostly about the list of devices."""
    return random_conversation(rng, partial(_kept, rng))


def _pool(rng: Random, tokenizer: Tokenizer) -> list[Tokens]:
    texts = [render(training_conversation(rng).messages()) for _ in range(POOL)]
    rows = [np.array(code.ids, dtype=np.int64) for code in tokenizer.encode_batch(texts)]
    return sorted((row for row in rows if len(row) <= MAX_TOKENS), key=len)


def padded(rows: list[Tokens], tokenizer: Tokenizer) -> Batch:
    """Return rows, the longest last, as one batch."""
    width = -(-len(rows[-1]) // ROUND) * ROUND
    ids = np.zeros((len(rows), width), dtype=np.int64)
    answers = np.zeros(ids.shape, dtype=np.bool_)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        answers[index, : len(row)] = answer_mask(row, tokenizer)
    return Batch(ids, answers)


def _cut(rows: list[Tokens], budget: int) -> Iterator[list[Tokens]]:
    part: list[Tokens] = []
    for row in rows:
        if part and (len(part) + 1) * len(row) > budget:
            yield part
            part = []
        part.append(row)
    yield part


def batches(tokenizer: Tokenizer, seed: int, budget: int) -> Iterator[Batch]:
    """Yield batches of conversations of like length, each of about this many tokens."""
    rng = Random(seed)
    while True:
        rows: list[Tokens] = []
        while sum(map(len, rows)) < 8 * budget:
            rows += _pool(rng, tokenizer)
        parts = list(_cut(sorted(rows, key=len), budget))
        rng.shuffle(parts)
        for part in parts:
            yield padded(part, tokenizer)
