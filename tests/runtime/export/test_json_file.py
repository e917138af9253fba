from pathlib import Path
from typing import Any

import pytest

from runtime.errors import HearthError
from runtime.export import json_file
from runtime.export.json_file import Fields, read_json


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
