from pathlib import Path

import msgspec
import pytest

from hearth.runtime.engine_folder import ANSWER_FILE, record_files
from hearth.runtime.errors import HearthError
from hearth.runtime.known_answer import KnownAnswer, load_answer
from hearth.runtime.request import TopLogprob
from tests.runtime.engine_configs import small_config

ANSWER = KnownAnswer(token_ids=(3, 4), best=(7, 8), leads=(1.5, 0.25), tolerance=0.1)


def top(*pairs: tuple[int, float]) -> list[TopLogprob]:
    return [TopLogprob(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("place", "tokens", "error"),
    [
        (0, top((7, -1.0), (9, -2.5)), 0.0),
        (0, top((7, -1.0), (9, -2.0)), 0.5),
        (1, top((8, -1.0), (9, -1.5)), 0.25),
        (1, top((9, -1.0), (8, -1.01)), 0.26),
        (1, top((9, -1.0), (6, -1.5), (8, -3.0)), 2.25),
        (1, top((9, -1.0), (6, -1.5), (5, -3.0)), 2.25),
    ],
)
def test_the_error_is_by_how_much_the_lead_is_off(
    place: int, tokens: list[TopLogprob], error: float
) -> None:
    assert ANSWER.error(place, tokens) == pytest.approx(error)


def stored(folder: Path, content: bytes) -> KnownAnswer | None:
    (folder / ANSWER_FILE).write_bytes(content)
    config = msgspec.structs.replace(small_config(), files=record_files(folder))
    return load_answer(folder, config)


def test_what_is_stored_is_read(tmp_path: Path) -> None:
    assert stored(tmp_path, msgspec.json.encode(ANSWER)) == ANSWER


def test_a_folder_without_an_answer_has_none(tmp_path: Path) -> None:
    (tmp_path / ANSWER_FILE).write_bytes(msgspec.json.encode(ANSWER))
    assert load_answer(tmp_path, small_config()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (3,)},
        {"leads": ()},
        {"best": (1, 2, 3)},
        {"token_ids": (3, 10**6)},
        {"token_ids": (3, -1)},
        {"token_ids": (), "best": (), "leads": ()},
        {"tolerance": 1e308},
        {"tolerance": -0.1},
    ],
)
def test_an_answer_that_makes_no_sense_is_corrupt(
    tmp_path: Path, change: dict[str, object]
) -> None:
    content = msgspec.json.encode(msgspec.structs.replace(ANSWER, **change))
    with pytest.raises(HearthError) as caught:
        stored(tmp_path, content)
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", ANSWER_FILE)


def test_a_tolerance_that_is_no_number_is_corrupt(tmp_path: Path) -> None:
    content = msgspec.json.encode(ANSWER)
    for number in (b"NaN", b"Infinity", b"1e999", b"null"):
        with pytest.raises(HearthError) as caught:
            stored(tmp_path, content.replace(b"0.1", number))
        assert caught.value.code == "engine_corrupt"


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"token_ids": [1]}'])
def test_what_is_no_answer_is_corrupt(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(HearthError) as caught:
        stored(tmp_path, content)
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", ANSWER_FILE)
