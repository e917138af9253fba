import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.options import ExportOptions
from models.conversations import Message, random_conversation, render
from models.evaluate import Score, ask_all, report, score, wrong
from models.perplexity import FLOAT, FORMS, Form, Perplexity, conversations, perplexity
from models.splits import Prompt, held_out, in_training
from models.stream import Batch
from models.vocabulary import UNSEEN

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


MODELS = Path(__file__).parents[2] / "models"
FOLDER = MODELS / "home-vision"


def _vision_json(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOLDER / name).read_text("utf-8"))
    return value


def test_it_takes_twelve_megabytes_at_most() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12_000_000


def test_the_text_is_shaped_as_that_of_the_text_model() -> None:
    own = _vision_json("config.json")["text_config"]
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
    config = _vision_json("config.json")
    named = {
        "<|image_pad|>": config["image_token_id"],
        "<|video_pad|>": config["video_token_id"],
        "<|vision_start|>": config["vision_start_token_id"],
        "<|vision_end|>": config["vision_end_token_id"],
    }
    assert {token: own.encode(token).ids for token in named} == {t: [i] for t, i in named.items()}
    assert max(named.values()) < text.get_vocab_size() == own.get_vocab_size()


PROMPTS = [
    Prompt("lights", [{"role": "user", "content": "one"}], "1"),
    Prompt("lights", [{"role": "user", "content": "two"}], "2"),
    Prompt("facts", [{"role": "user", "content": "three"}], "3"),
]


def _echo(messages: list[Message]) -> str:
    return {"one": "1", "two": "two", "three": " 3\n"}[messages[-1]["content"]]


def test_score_counts_exact_matches_by_group() -> None:
    scores = score(PROMPTS, ["1", "two", "3"])
    assert scores == {"facts": Score(1, 1), "lights": Score(1, 2), "all": Score(2, 3)}


def test_answers_come_in_the_order_of_the_prompts() -> None:
    answers = ask_all(PROMPTS, _echo, threads=3)
    assert answers == ["1", "two", " 3\n"]
    assert score(PROMPTS, answers)["all"] == Score(2, 3)


def test_report_has_a_line_for_each_group() -> None:
    assert report(score(PROMPTS, ["1", "2", "3"])).splitlines()[-1].split()[0] == "all"


def test_wrong_shows_only_what_was_wrong() -> None:
    assert wrong(PROMPTS, ["1", "nope", "3"]).splitlines()[0] == "lights: two"


def test_the_share_of_nothing_is_zero() -> None:
    assert Score(0, 0).share == 0.0


MOST = {"int8": 1.01, "int4": 1.10}
"""How many times the perplexity of 16 bits that of rounded weights may be."""


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return conversations(Tokenizer.from_file(str(HOME / "tokenizer.json")), held_out()[::120])


def measured(batches: list[Batch], options: ExportOptions) -> Perplexity:
    return perplexity(load_model_config(HOME), Checkpoint(HOME), batches, options)


@pytest.fixture(scope="module")
def whole(batches: list[Batch]) -> Perplexity:
    return measured(batches, FLOAT)


def test_the_model_knows_the_answers_of_prompts_that_it_never_saw(whole: Perplexity) -> None:
    assert 1 < whole.answers < 1.2


@pytest.mark.parametrize("form", [FORMS[0], *FORMS[3:]], ids=str)
def test_rounded_weights_cost_little(batches: list[Batch], whole: Perplexity, form: Form) -> None:
    found = measured(batches, form.options)
    assert found.answers <= whole.answers * MOST[form.body]
    assert found.text <= whole.text * MOST[form.body]
    assert found.right >= whole.right - 0.1


def test_rows_of_a_batch_are_whole_conversations(batches: list[Batch]) -> None:
    for ids, answers in batches:
        assert ids.shape == answers.shape
        assert answers.any(axis=1).all()
        assert not answers[ids == 0].any()
        lengths = (ids != 0).sum(axis=1)
        assert (np.diff(lengths) >= 0).all()
        assert all(row[:length].all() for row, length in zip(ids, lengths, strict=True))
