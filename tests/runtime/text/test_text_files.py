import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.config import load_config
from hearth.runtime.engine_folder import write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.text import Tokenizer
from hearth.runtime.text.tokenizer import TokenizerFile
from tests.runtime.text.folders import byte_level, word_level, write_folder


def opening_fails(folder: Path, code: str, name: str) -> None:
    with pytest.raises(HearthError) as caught:
        Tokenizer.open(folder)
    assert (caught.value.code, caught.value.field) == (code, name)
    assert name in caught.value.message


def test_size_and_unknown_token(tmp_path: Path) -> None:
    file = TokenizerFile.read(write_folder(tmp_path, word_level()))
    assert (file.size, file.unknown) == (7, 0)
    file = TokenizerFile.read(write_folder(tmp_path, byte_level()))
    assert (file.size, file.unknown) == (file.library.get_vocab_size(), None)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_tokenizer_is_refused(tmp_path: Path, keep: int) -> None:
    folder = write_folder(tmp_path, byte_level())
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:keep])
    opening_fails(folder, "engine_corrupt", "tokenizer.json")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[]", b"null", b'{"model": {"type": "Nope"}}'])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, data: bytes) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / "tokenizer.json").write_bytes(data)
    opening_fails(folder, "engine_corrupt", "tokenizer.json")


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / "tokenizer.json").unlink()
    opening_fails(folder, "engine_corrupt", "tokenizer.json")


def test_more_tokens_than_the_model_has_are_refused(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    Tokenizer.open(write_folder(tmp_path, byte_level(), vocab_size=size))
    folder = write_folder(tmp_path, byte_level(), vocab_size=size - 1)
    opening_fails(folder, "tokenizer_mismatch", "tokenizer.json")


def test_an_end_token_that_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), eos=399)
    opening_fails(folder, "tokenizer_mismatch", "tokenizer.json")


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    opening_fails(folder, "engine_corrupt", "chat_template.jinja")


@pytest.mark.parametrize(("older", "bos"), [(False, "<think>"), (True, "<|endoftext|>")])
def test_token_variables_are_those_that_were_exported(
    tmp_path: Path, *, older: bool, bos: str
) -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    folder = write_folder(tmp_path, byte_level(), source, bos=0)
    tokens = {"bos_token": "<think>", "eos_token": "<|im_end|>"}
    # Format 1 has none: they follow from the ids of the model.
    changes: dict[str, Any] = {"engine_format": 1} if older else {}
    write_config(folder, structs.replace(load_config(folder), template_tokens=tokens, **changes))
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.decode(tokenizer.encode_chat([]), skip_special=False) == f"{bos}|<|im_end|>|"


def test_limits_from_training_do_not_cut_or_pad(tmp_path: Path) -> None:
    library = byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=50)
    tokenizer = Tokenizer.open(write_folder(tmp_path, library))
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    assert stored["truncation"] is not None
    assert tokenizer.decode(tokenizer.encode("the lamp is on")) == "the lamp is on"
    assert len(tokenizer.encode("x")) == 1
