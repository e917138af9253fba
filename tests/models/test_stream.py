from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from models.conversations import random_conversation
from models.domain import Turn
from models.splits import in_training
from models.stream import answer_mask, batches, training_conversation
from models.vocabulary import ROOMS

TOKENIZER = Tokenizer.from_file(
    str(Path(__file__).parents[2] / "models" / "home" / "tokenizer.json")
)


def test_only_answers_and_their_ends_are_learned() -> None:
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    ids = np.array(TOKENIZER.encode(text).ids)
    learned = ids[answer_mask(ids, TOKENIZER)].tolist()
    assert TOKENIZER.decode(learned, skip_special_tokens=False) == "hi<|im_end|>"


def test_batches_keep_to_the_budget_and_to_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.stream.POOL", 32)
    first, second = (next(batches(TOKENIZER, 4, 2048)) for _ in range(2))
    assert np.array_equal(first.ids, second.ids)
    assert first.ids.shape == first.answers.shape
    assert first.answers.any(axis=1).all()


def _of_a_room(turns: list[Turn]) -> float:
    found = [
        turn
        for turn in turns
        if turn.group in {"questions", "scenes"} and turn.combination.device in ROOMS
    ]
    return len(found) / len(turns)


def test_the_stream_asks_more_often_about_the_devices_of_a_room() -> None:
    rng = Random(14)
    plain = [turn for _ in range(200) for turn in random_conversation(rng, in_training).turns]
    mixed = [turn for _ in range(200) for turn in training_conversation(rng).turns]
    assert _of_a_room(mixed) > 1.5 * _of_a_room(plain)
    assert len({turn.intent for turn in mixed}) > 80
