import json
from pathlib import Path
from random import Random
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer

from models.conversations import random_conversation, render
from models.splits import in_training

MODELS = Path(__file__).parents[2] / "models"
FOLDER = MODELS / "home-vision"


def _json(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOLDER / name).read_text("utf-8"))
    return value


def test_it_takes_twelve_megabytes_at_most() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12_000_000


def test_the_text_is_shaped_as_that_of_the_text_model() -> None:
    own = _json("config.json")["text_config"]
    text = json.loads((MODELS / "home" / "config.json").read_text("utf-8"))
    for name in ("hidden_size", "num_hidden_layers", "head_dim", "vocab_size", "rope_theta"):
        assert own[name] == text[name]
    with safe_open(MODELS / "home" / "model.safetensors", "np") as weights:
        names = {name.replace("model.", "model.language_model.", 1) for name in weights.keys()}  # noqa: SIM118 - no mapping
    with safe_open(FOLDER / "model.safetensors", "np") as weights:
        seeing = set(weights.keys())
    assert names == {name for name in seeing if not name.startswith("model.visual.")}


def test_text_keeps_its_tokens_and_vision_has_four_of_its_own() -> None:
    own, text = (
        Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))
        for name in ("home-vision", "home")
    )
    rng = Random(1)
    for _ in range(20):
        said = render(random_conversation(rng, in_training).messages()) + " Grüße, 世界! 🙂"
        assert own.encode(said).ids == text.encode(said).ids
    config = _json("config.json")
    named = {
        "<|image_pad|>": config["image_token_id"],
        "<|video_pad|>": config["video_token_id"],
        "<|vision_start|>": config["vision_start_token_id"],
        "<|vision_end|>": config["vision_end_token_id"],
    }
    assert {token: own.encode(token).ids for token in named} == {t: [i] for t, i in named.items()}
    assert max(named.values()) < text.get_vocab_size() == own.get_vocab_size()
