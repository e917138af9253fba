from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.export import json_file
from hearth.runtime.export.json_file import Fields, read_config, read_json


def fault(path: Path) -> HearthError:
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
    fault(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    fault(tmp_path / "some.json")


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "JSON_LIMIT", 10)
    path = tmp_path / "some.json"
    path.write_text('{"a": "0123456789"}')
    assert "large" in fault(path).message


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
