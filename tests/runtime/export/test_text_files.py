import json
from pathlib import Path
from typing import Any

import pytest

from runtime.engine_folder import TEMPLATE_FILE, TOKENIZER_FILE
from runtime.errors import HearthError
from runtime.export.model_config import load_model_config
from runtime.export.text_files import copy_text_files, read_template
from tests.references import reference_folder
from tests.runtime.export.hugging_face import copy_model


def fault(source: Path, target: Path) -> tuple[str, str | None]:
    with pytest.raises(HearthError) as caught:
        copy_text_files(source, target, load_model_config(source))
    return caught.value.code, caught.value.field


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_tokenizer_and_template_are_copied_from_either_place(tmp_path: Path, name: str) -> None:
    source = reference_folder(name)
    copy_text_files(source, tmp_path, load_model_config(source))
    assert (tmp_path / TOKENIZER_FILE).read_bytes() == (source / TOKENIZER_FILE).read_bytes()
    assert "<|im_start|>" in (tmp_path / TEMPLATE_FILE).read_text()


@pytest.mark.parametrize("settings", [None, {}, {"chat_template": None}])
def test_a_model_without_template_gets_none(tmp_path: Path, settings: Any) -> None:
    source = copy_model("qwen2", tmp_path / "m")
    (source / "tokenizer_config.json").unlink()
    if settings is not None:
        (source / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_template(source) is None


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    source = copy_model("qwen2", tmp_path / "m")
    templates = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}, 3]
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert read_template(source) == "b"


@pytest.mark.parametrize("template", [7, {"default": "x"}, [{"name": "default", "template": 1}]])
def test_a_template_that_is_no_text_is_refused(tmp_path: Path, template: Any) -> None:
    source = copy_model("qwen2", tmp_path / "m")
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert fault(source, tmp_path) == ("model_invalid", "chat_template")


def test_a_template_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    source = copy_model("qwen3", tmp_path / "m")
    (source / TEMPLATE_FILE).write_bytes(b"\xff")
    assert fault(source, tmp_path) == ("model_invalid", TEMPLATE_FILE)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    source = copy_model("qwen3", tmp_path / "m")
    (source / TOKENIZER_FILE).unlink()
    assert fault(source, tmp_path) == ("model_invalid", TOKENIZER_FILE)


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    source = copy_model("qwen3", tmp_path / "m")
    (source / TOKENIZER_FILE).write_text(content)
    assert fault(source, tmp_path) == ("model_invalid", TOKENIZER_FILE)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    source = copy_model("qwen3", tmp_path / "m", vocab_size=200)
    assert fault(source, tmp_path) == ("tokenizer_mismatch", TOKENIZER_FILE)


def test_a_tokenizer_without_the_end_token_is_refused(tmp_path: Path) -> None:
    source = copy_model("qwen3", tmp_path / "m", vocab_size=400)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 350}))
    assert fault(source, tmp_path) == ("tokenizer_mismatch", TOKENIZER_FILE)
