import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from models.conversations import random_conversation, render
from models.names import UNSEEN
from models.splits import in_training

HOME = Path(__file__).parents[2] / "models" / "home"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(HOME / "tokenizer.json"))


def _json(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((HOME / name).read_text("utf-8"))
    return value


def test_the_shape_is_what_was_asked_for() -> None:
    config = _json("config.json")
    assert config["model_type"] == "qwen3"
    assert config["num_hidden_layers"] == 12
    assert 192 <= config["hidden_size"] <= 256
    assert config["tie_word_embeddings"] is True


def test_two_to_eight_million_parameters_and_no_second_head() -> None:
    with safe_open(HOME / "model.safetensors", "np") as weights:
        names = list(weights.keys())
        shapes = [weights.get_slice(name).get_shape() for name in names]
    total = 0
    for shape in shapes:
        size = 1
        for side in shape:
            size *= side
        total += size
    assert 2_000_000 <= total <= 8_000_000
    assert "lm_head.weight" not in names


def test_end_tokens_are_the_tokenizers(tokenizer: Tokenizer) -> None:
    ends = _json("generation_config.json")["eos_token_id"]
    assert ends == [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    assert _json("config.json")["vocab_size"] == tokenizer.get_vocab_size()


def test_the_tokenizer_gives_back_every_text(tokenizer: Tokenizer) -> None:
    rng = Random(1)
    texts = [render(random_conversation(rng, in_training).messages()) for _ in range(20)]
    for text in [*texts, "Grüße, 世界! 🙂\n\ttabs  and   spaces", ""]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_name_has_the_same_tokens_wherever_it_stands(tokenizer: Tokenizer) -> None:
    for name in (name for group in UNSEEN.values() for name in group):
        inner = tokenizer.encode(name).tokens
        for text in (f'"device":"{name}"', f"- {name} (light, study)", f"the {name}."):
            tokens = tokenizer.encode(text).tokens
            starts = range(len(tokens) - len(inner) + 1)
            assert any(tokens[i : i + len(inner)] == inner for i in starts)
