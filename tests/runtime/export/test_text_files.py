import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hearth.runtime.engine_folder import (
    RESPONSE_TEMPLATE_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    TOOL_TEMPLATE_FILE,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.export import json_file
from hearth.runtime.export.json_file import Fields, read_config, read_json
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.text_files import (
    copy_text_files,
    read_sampling,
    read_template,
    read_template_tokens,
)
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


@pytest.mark.parametrize("place", ["setting", "file"])
def test_a_template_for_tools_and_one_for_replies_are_kept(tmp_path: Path, place: str) -> None:
    source = copy_model("qwen2", tmp_path / "m")
    replies = {"start_anchor": "<a>", "fields": {"content": {}}}
    settings: dict[str, Any] = {"chat_template": "a", "response_template": replies}
    if place == "setting":
        named = {"default": "a", "tool_use": "b"}
        settings["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    else:
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool_use.jinja").write_text("b")
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    copy_text_files(source, tmp_path, load_model_config(source))
    assert (tmp_path / TEMPLATE_FILE).read_text() == "a"
    assert (tmp_path / TOOL_TEMPLATE_FILE).read_text() == "b"
    assert json.loads((tmp_path / RESPONSE_TEMPLATE_FILE).read_bytes()) == replies


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


@pytest.mark.parametrize(
    ("published", "sampling"),
    [
        ({}, {}),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "min_p": None},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
    ],
)
def test_options_of_sampling_are_those_of_the_publisher(
    published: dict[str, Any], sampling: dict[str, float], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    assert read_sampling(tmp_path) == sampling


@pytest.mark.parametrize("published", [{"top_p": 0}, {"temperature": "hot"}, {"top_k": 2.5}])
def test_options_out_of_their_range_are_refused(published: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    with pytest.raises(HearthError) as caught:
        read_sampling(tmp_path)
    assert (caught.value.code, caught.value.field) == ("model_invalid", *published)


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


def json_fault(path: Path) -> HearthError:
    with pytest.raises(HearthError) as caught:
        read_json(path)
    assert caught.value.code == "model_invalid"
    assert caught.value.field == path.name
    return caught.value


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000], ids=repr
)
def test_a_file_that_holds_no_object_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    json_fault(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    json_fault(tmp_path / "some.json")


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "JSON_LIMIT", 10)
    path = tmp_path / "some.json"
    path.write_text('{"a": "0123456789"}')
    assert "large" in json_fault(path).message


@pytest.mark.parametrize(
    ("reader", "value"),
    [
        ("size", 0),
        ("size", -1),
        ("size", 1.5),
        ("size", True),
        ("size", "8"),
        ("size", 1 << 63),
        ("number", 0),
        ("number", -0.5),
        ("number", "1"),
        ("number", False),
        ("number", 10**400),
        ("text", 1),
        ("table", []),
        ("token_ids", -1),
        ("token_ids", [1, "2"]),
        ("token_ids", True),
        ("token_ids", {}),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(reader: str, value: Any) -> None:
    with pytest.raises(HearthError) as caught:
        getattr(Fields({"x": value}, "some.json"), reader)("x")
    assert (caught.value.code, caught.value.field) == ("model_invalid", "x")


@pytest.mark.parametrize("data", [{}, {"x": None}])
def test_null_counts_as_absent(data: dict[str, Any]) -> None:
    fields = Fields(data, "some.json")
    assert fields.size("x", 3) == 3
    assert fields.number("x", 0.5) == 0.5
    assert fields.text("x", "a") == "a"
    assert fields.flag("x", default=True) is True
    assert fields.table("x") is None
    assert fields.token_ids("x") == ()
    with pytest.raises(HearthError, match="lacks x"):
        fields.size("x")


def test_a_flag_is_true_or_false() -> None:
    assert Fields({"x": False}, "").flag("x", default=True) is False
    with pytest.raises(HearthError):
        Fields({"x": 1}, "").flag("x", default=True)


def test_token_ids_come_alone_or_in_lists_and_once() -> None:
    assert Fields({"x": 7}, "").token_ids("x") == (7,)
    assert Fields({"x": [3, 1, 3]}, "").token_ids("x") == (3, 1)


def empty(_path: Path) -> None:
    pass


def gguf_file(path: Path) -> None:
    path.rmdir()
    path.write_bytes(b"GGUF\x03")


def other_file(path: Path) -> None:
    path.rmdir()
    path.write_bytes(b"PK")


def gguf_folder(path: Path) -> None:
    (path / "model-q4.gguf").touch()


def engine_with_draft(path: Path) -> None:
    (path / "base_config.json").touch()


def engine(path: Path) -> None:
    (path / "config.json").write_text('{"engine_format": 1}')


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (empty, "has no config.json: a model is the folder"),
        (gguf_file, "is a GGUF file, which is not read: a model is the folder"),
        (other_file, "is a file: a model is the folder"),
        (gguf_folder, "holds GGUF files, which are not read: a model is the folder"),
        (engine_with_draft, "is an engine already"),
        (engine, "is an engine already"),
        (Path.rmdir, "does not exist: name the folder of a model"),
    ],
)
def test_what_is_no_model_is_said_to_be_what_it_is(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    path = tmp_path / "it"
    path.mkdir()
    make(path)
    with pytest.raises(HearthError) as caught:
        read_config(path)
    assert caught.value.message.startswith(f"{path} {words}")
    assert caught.value.code == "model_invalid"


def test_a_name_of_the_hub_is_not_fetched_and_says_how() -> None:
    with pytest.raises(HearthError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir DIR"):
        read_config(Path("Qwen/Qwen3-0.6B"))
