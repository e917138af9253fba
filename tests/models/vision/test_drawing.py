from random import Random

import numpy as np
import pytest

from models.vision.drawing import CLASSES, LETTERS, draw_scene
from models.vision.scenes import Gauge, Scene, Sign, Thing
from models.vision.things import COLOURS, KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_thing_has_its_colour_and_is_named_where_its_centre_lies(kind: str) -> None:
    scene = Scene("objects", 96, 64, things=(Thing(kind, "red", 0, 0, 70, 30, 40),))
    picture = draw_scene(Random(1), scene)
    assert picture.pixels.shape == (64, 96, 3)
    red = (picture.pixels.astype(int) - COLOURS["red"]).__abs__().max(2) < 40
    rows, columns = np.nonzero(red)
    assert len(rows) > 100
    assert abs(rows - 30).max() <= 21
    assert abs(columns - 70).max() <= 21
    assert picture.seen.shape == (2, 3, len(CLASSES))
    assert picture.seen[0, 2, 0] == 1 + KINDS.index(kind)
    assert np.count_nonzero(picture.seen[..., 0]) == 1


def test_the_letters_of_a_sign_are_told_from_left_to_right() -> None:
    scene = Scene("signs", 224, 96, signs=(Sign("STOP", 112, 48, 28, dark=True),))
    seen = draw_scene(Random(2), scene).seen
    told = [LETTERS[letter - 1] for cell in seen[1] for letter in cell[2:5] if letter]
    assert "".join(told) == "STOP"


def test_gauges_of_different_values_look_different() -> None:
    for kind in ("dial", "thermometer"):
        pictures = [
            draw_scene(
                Random(3),
                Scene(
                    "gauges", 96, 96, gauges=(Gauge(kind, "blue", value, 48, 48, 80, dark=False),)
                ),
            )
            for value in (3, 4)
        ]
        first, second = (picture.pixels.astype(int) for picture in pictures)
        assert np.count_nonzero(abs(first - second).max(2) > 60) > 20
        assert [int(picture.seen[..., 5].max()) for picture in pictures] == [4, 5]


def test_a_seed_draws_one_picture() -> None:
    scene = Scene("objects", 64, 64, things=(Thing("star", "green", 0, 0, 30, 30, 40),))
    assert np.array_equal(draw_scene(Random(5), scene).pixels, draw_scene(Random(5), scene).pixels)
