"""The tokenizer, and an endless seeded stream of training batches, made while the model trains."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.conversations import Conversation, random_conversation, render
from models.domain import Turn, likely
from models.speech.talk import speech_conversation, tool_speech
from models.splits import in_training
from models.tools import tool_conversation
from models.vocabulary import ROOMS

END_OF_TEXT: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
VOCABULARY: Final = 1024
CONVERSATIONS: Final = 4000
# Plain tokens for tools and reasoning take the places of bytes that no UTF-8 text has.
MARKERS: Final = {
    "<tool_call>": "õ", "</tool_call>": "ö", "<tool_response>": "÷", "</tool_response>": "ø",
    "<think>": "ù", "</think>": "ú",
}  # fmt: skip
_SPEECH: Final = 0.47
_TOOL_SPEECH: Final = 0.25
_WITH_TOOLS: Final = 0.28
"""Share of the rest."""

# A space is no part of a word, so that a name copied from the list into JSON keeps its tokens.
_PIECES: Final = r"\p{L}+|\p{N}|\n|[^\p{L}\p{N}\n]+"


def training_text(seed: int) -> Iterator[str]:
    """Yield the text of training conversations, without special tokens."""
    rng = Random(seed)
    for _ in range(CONVERSATIONS):
        text = text_of(training_conversation(rng))
        for token in (START, END, *MARKERS):
            text = text.replace(token, "")
        yield text


def with_tokens(tokenizer: Tokenizer, places: Mapping[str, str], *, special: bool) -> Tokenizer:
    """Return the tokenizer with further tokens in the places of these bytes, so all ids stay."""
    tree = json.loads(tokenizer.to_str())
    vocabulary = tree["model"]["vocab"]
    for token, byte in places.items():
        vocabulary[token] = vocabulary.pop(byte)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = {"id": vocabulary[token], "content": token, **flags, "special": special}
        tree["added_tokens"].append(added)
    tree["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda entry: entry[1]))
    return Tokenizer.from_str(json.dumps(tree))


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
    return with_tokens(tokenizer, MARKERS, special=False)


MAX_TOKENS: Final = 2048
POOL: Final = 512
ROUND: Final = 32

# What is soon learned is thinned out: to find the devices of a room takes the longest.
_OF_A_ROOM: Final = 0.9
_OF_THE_HOME: Final = 0.5
_OTHERS: Final = 0.5
_NAMELESS: Final = 0.2

Tokens = npt.NDArray[np.int64]


class Row(NamedTuple):
    """Token ids of a conversation, and which of the assistant's messages others gave."""

    ids: Tokens
    foreign: frozenset[int] = frozenset()


class Batch(NamedTuple):
    """Token ids, right-padded, and which of them belong to an answer."""

    ids: Tokens
    answers: npt.NDArray[np.bool_]


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder, with the markers that it may not have yet."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    places = {token: byte for token, byte in MARKERS.items() if not tokenizer.token_to_id(token)}
    return with_tokens(tokenizer, places, special=False)


def answer_mask(
    ids: Tokens, tokenizer: Tokenizer, foreign: frozenset[int] = frozenset()
) -> npt.NDArray[np.bool_]:
    """Return which tokens an assistant has to produce: its text and the end of its turn.

    Messages of `foreign`, by their order among the assistant's, are left out.
    """
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    header = [start, *tokenizer.encode("assistant\n").ids]
    mask = np.zeros(len(ids), dtype=np.bool_)
    ends, order = np.flatnonzero(ids == end), 0
    for begin in np.flatnonzero(ids == start):
        first = begin + len(header)
        if ids[begin:first].tolist() == header:
            stop = ends[np.searchsorted(ends, begin)]
            mask[first : stop + 1] = order not in foreign
            order += 1
    return mask


def _share(turn: Turn) -> float:
    subject = turn.combination.device
    if not subject:
        return _NAMELESS
    if turn.group in {"refusals", "which"}:
        return _OF_THE_HOME
    if turn.group not in {"questions", "scenes", "everyday"}:
        return _OTHERS
    return _OF_A_ROOM if subject in ROOMS else _OF_THE_HOME


def _kept(rng: Random, turn: Turn) -> bool:
    return likely(rng, _share(turn)) and in_training(turn)


def training_conversation(rng: Random) -> Conversation:
    """Return a conversation without held-out combinations, mostly about the list of devices."""
    source = rng.random()
    if source < _SPEECH:
        return speech_conversation(rng, in_training)
    if source < _SPEECH + _TOOL_SPEECH:
        return tool_speech(rng, in_training)
    kept = partial(_kept, rng)
    if likely(rng, _WITH_TOOLS):
        return tool_conversation(rng, kept, in_training)
    return random_conversation(rng, kept)


def text_of(conversation: Conversation) -> str:
    """Return the text of a conversation."""
    return render(conversation.messages(), conversation.tools)


def _pool(rng: Random, tokenizer: Tokenizer) -> list[Row]:
    made = [training_conversation(rng) for _ in range(POOL)]
    codes = tokenizer.encode_batch([text_of(one) for one in made])
    rows = [
        Row(np.array(code.ids, dtype=np.int64), one.foreign())
        for code, one in zip(codes, made, strict=True)
    ]
    return [row for row in rows if len(row.ids) <= MAX_TOKENS]


def padded(rows: list[Row], tokenizer: Tokenizer) -> Batch:
    """Return rows, the longest last, as one batch."""
    width = -(-len(rows[-1].ids) // ROUND) * ROUND
    ids = np.zeros((len(rows), width), dtype=np.int64)
    answers = np.zeros(ids.shape, dtype=np.bool_)
    for index, (row, foreign) in enumerate(rows):
        ids[index, : len(row)] = row
        answers[index, : len(row)] = answer_mask(row, tokenizer, foreign)
    return Batch(ids, answers)


def _cut(rows: list[Row], budget: int) -> Iterator[list[Row]]:
    part: list[Row] = []
    for row in rows:
        if part and (len(part) + 1) * len(row.ids) > budget:
            yield part
            part = []
        part.append(row)
    yield part


def batches(tokenizer: Tokenizer, seed: int, budget: int) -> Iterator[Batch]:
    """Yield batches of conversations of like length, each of about this many tokens."""
    rng = Random(seed)
    while True:
        rows: list[Row] = []
        while sum(len(row.ids) for row in rows) < 8 * budget:
            rows += _pool(rng, tokenizer)
        parts = list(_cut(sorted(rows, key=lambda row: len(row.ids)), budget))
        rng.shuffle(parts)
        for part in parts:
            yield padded(part, tokenizer)
