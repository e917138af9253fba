import json
from pathlib import Path
from typing import Any

import pytest

from hearth.runtime.engine_folder import TEMPLATE_FILE, TOKENIZER_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.text_files import copy_text_files, read_template, read_template_tokens
from hearth.runtime.text.chat_template import ChatTemplate
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


IM_END = {
    "content": "<|im_end|>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
}
TOKEN_FILES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "settings": ({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, None),
    "none": ({"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, None),
    "map": (None, {"bos_token": IM_END, "unk_token": "<|endoftext|>"}),
    "map_first": (
        {"bos_token": "<|im_start|>", "sep_token": "<|im_start|>"},
        {"bos_token": None, "eos_token": IM_END},
    ),
    "all_told": (
        {
            "bos_token": "<|im_start|>",
            "added_tokens_decoder": {"2": IM_END | {"special": True}},
            "image_token": "<|im_end|>",
            "extra_special_tokens": {"video_token": "<|im_start|>"},
        },
        {"bos_token": "<|im_end|>", "cls_token": "<|im_end|>"},
    ),
}  # fmt: skip
SHOWN = ["bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "video"]


def with_token_files(target: Path, name: str) -> Path:
    """A model whose config.json says other tokens than the tokenizer's files."""
    source = copy_model("qwen3", target, bos_token_id=1)
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    for file, fields in zip(
        ("tokenizer_config.json", "special_tokens_map.json"), TOKEN_FILES[name], strict=True
    ):
        (source / file).unlink(missing_ok=True)
        if fields is not None:
            own = {"tokenizer_class": "PreTrainedTokenizerFast"} if "tok" in file[:3] else {}
            (source / file).write_text(json.dumps(own | fields))
    template = "".join(f"[{one} {{{{ {one}_token }}}}]" for one in SHOWN)
    (source / TEMPLATE_FILE).write_text(template)
    return source


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("settings", {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}),
        ("none", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
        ("map", {"bos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}),
        ("map_first", {"eos_token": "<|im_end|>", "sep_token": "<|im_start|>"}),
        (
            "all_told",
            {
                "bos_token": "<|im_start|>",
                "image_token": "<|im_end|>",
                "video_token": "<|im_start|>",
            },
        ),
    ],
)
def test_template_tokens_are_those_of_the_tokenizer(
    tmp_path: Path, name: str, expected: dict[str, str]
) -> None:
    source = with_token_files(tmp_path / "m", name)
    assert read_template_tokens(source, load_model_config(source)) == expected


def test_template_tokens_follow_from_the_ids_where_no_file_names_them(tmp_path: Path) -> None:
    source = copy_model("qwen3", tmp_path / "m", bos_token_id=1)
    (source / "tokenizer_config.json").unlink()
    found = read_template_tokens(source, load_model_config(source))
    assert found == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize("value", [7, ["<s>"], {"content": 7}, {}])
def test_a_template_token_that_is_no_text_is_refused(tmp_path: Path, value: Any) -> None:
    source = copy_model("qwen3", tmp_path / "m")
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    with pytest.raises(HearthError) as caught:
        read_template_tokens(source, load_model_config(source))
    assert (caught.value.code, caught.value.field) == ("model_invalid", "eos_token")


@pytest.mark.reference
@pytest.mark.parametrize("name", list(TOKEN_FILES))
def test_templates_see_the_tokens_that_transformers_gives_them(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    source = with_token_files(tmp_path / "m", name)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(source)
    messages = [{"role": "user", "content": "hi"}]
    wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = read_template_tokens(source, load_model_config(source))
    template = ChatTemplate((source / TEMPLATE_FILE).read_text(), tokens)
    assert template.render(messages) == wanted
