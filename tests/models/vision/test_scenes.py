from random import Random

import pytest

from models.vision.questions import GROUPS, question
from models.vision.rows import MAKERS
from models.vision.scenes import Scene, anything, in_training, objects
from models.vision.things import CELLS, KINDS, SIGNS, is_held_out, random_text

SIZE = (256, 192)


def _combinations(scene: Scene) -> set[tuple[object, ...]]:
    signs = enumerate(scene.signs)
    found: set[tuple[object, ...]] = {
        ("sign", sign.text, sign.dark, len(scene.signs), index) for index, sign in signs
    }
    found |= {("gauge", g.kind, g.colour, g.value) for g in scene.gauges}
    if scene.group == "objects":
        return {thing[:4] for thing in scene.things}
    kinds = [thing[:2] for thing in scene.things]
    return found | {("count", *kind, kinds.count(kind)) for kind in kinds}


@pytest.mark.parametrize("group", list(MAKERS))
def test_training_shows_no_combination_that_is_held_out(group: str) -> None:
    rng = Random(2)
    for allowed, wanted in ((in_training, 0), (anything, 1)):
        scenes = [MAKERS[group](rng, SIZE, allowed) for _ in range(60)]
        held = [c for scene in scenes for c in _combinations(scene) if is_held_out(*c)]
        assert bool(held) == wanted


def test_about_one_combination_in_eight_is_held_out() -> None:
    pairs = [("sign", word) for word in SIGNS] + [
        ("x", kind, n) for kind in KINDS for n in range(9)
    ]
    share = sum(is_held_out(*pair) for pair in pairs) / len(pairs)
    assert 0.08 < share < 0.18


@pytest.mark.parametrize("group", list(MAKERS))
def test_everything_lies_within_the_picture(group: str) -> None:
    rng = Random(3)
    for _ in range(60):
        scene = MAKERS[group](rng, SIZE, in_training)
        places = [(thing.x, thing.y) for thing in scene.things]
        places += [(sign.x, sign.y) for sign in scene.signs]
        places += [(gauge.x, gauge.y) for gauge in scene.gauges]
        assert places
        assert all(0 < x < SIZE[0] and 0 < y < SIZE[1] for x, y in places)


def test_a_mirrored_scene_has_its_things_at_the_other_side() -> None:
    scene = objects(Random(4), SIZE, in_training)
    twice = scene.mirrored(across=True, down=False).mirrored(across=True, down=False)
    for thing, moved, back in zip(
        scene.things, scene.mirrored(across=True, down=True).things, twice.things, strict=True
    ):
        assert (moved.x, moved.y) == (SIZE[0] - thing.x, SIZE[1] - thing.y)
        assert moved.kind == thing.kind
        assert back.x == pytest.approx(thing.x)


def test_every_group_is_asked_about_and_places_are_told_by_the_pixels() -> None:
    rng, asked = Random(5), set()
    for make in MAKERS.values():
        for _ in range(40):
            scene = make(rng, SIZE, in_training)
            one = question(rng, scene)
            asked.add(one.group)
            if one.text.startswith("Where"):
                thing = next(t for t in scene.things if t.kind in one.text.split("the ")[1])
                cell = int(thing.y * 3 / SIZE[1]) * 3 + int(thing.x * 3 / SIZE[0])
                assert one.answer == f"The {thing.colour} {thing.kind} is {CELLS[cell]}."
    assert asked == set(GROUPS)


def test_signs_are_words_inventions_and_numbers() -> None:
    texts = [random_text(Random(seed)) for seed in range(200)]
    assert {text in SIGNS for text in texts} == {True, False}
    assert any(text.isdigit() for text in texts)
    assert all(text.isalnum() and text == text.upper() for text in texts)
