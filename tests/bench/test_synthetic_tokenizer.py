import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bench.synthetic_tokenizer import END_ID, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 300)
    return folder


def test_the_vocabulary_has_the_size_asked_for(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    assert sorted(tokenizer.get_vocab().values()) == list(range(300))


def test_the_end_token_is_the_one_the_configuration_names(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    configuration = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer.token_to_id(configuration["eos_token"]) == END_ID


@settings(max_examples=50)
@given(text=st.text(max_size=40))
def test_any_text_survives_the_round_trip(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
