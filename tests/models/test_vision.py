from mmap import mmap
from pathlib import Path
from random import Random

import numpy as np
import pytest

from hearth.runtime.image_processing.positions import row_positions
from hearth.runtime.images import ImageSpan
from models.evaluate import Score
from models.evaluate_vision import blanked, wrong
from models.vision.drawing import CLASSES, LETTERS, draw_scene
from models.vision.questions import GROUPS, held_out_prompts, question, score, table
from models.vision.rows import (
    IMAGE,
    LENGTH,
    SIZES,
    Filler,
    Shape,
    Writer,
    shown,
    vision_tokenizer,
)
from models.vision.scenes import (
    CELLS,
    COLOURS,
    KINDS,
    MAKERS,
    SIGNS,
    Gauge,
    Scene,
    Sign,
    Thing,
    anything,
    in_training,
    is_held_out,
    objects,
    random_text,
)


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


def test_each_group_has_its_questions_and_a_seed_gives_one_set() -> None:
    first, second = held_out_prompts(3), held_out_prompts(3)
    assert [p.group for p in first] == [group for group in GROUPS for _ in range(3)]
    assert [p[:3] for p in first] == [p[:3] for p in second]
    assert all((a.pixels == b.pixels).all() for a, b in zip(first, second, strict=True))


def test_score_and_table_have_a_place_for_every_group() -> None:
    prompts = held_out_prompts(2)
    answers = [f" {p.expected}\n" if i else "no" for i, p in enumerate(prompts)]
    scores = score(prompts, answers)
    assert scores["all"] == Score(len(prompts) - 1, len(prompts))
    assert scores[GROUPS[0]] == Score(1, 2)
    head, line = table({"whole": scores}).splitlines()
    assert head.split() == [*GROUPS, "all"]
    assert line.split()[:3] == ["whole", "50.0", "100.0"]


TOKENIZER = vision_tokenizer(Path(__file__).parents[2] / "models" / "home")
PAD = TOKENIZER.token_to_id(IMAGE)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_positions_that_the_runtime_counts(size: tuple[int, int]) -> None:
    pictures = tuple(
        shown(Random(seed), size)._replace(across=False, down=False) for seed in (1, 2)
    )
    row = Writer(TOKENIZER).conversation(Random(3), pictures)
    tokens = size[0] * size[1] // 32**2
    starts = np.flatnonzero(row.ids == PAD)[::tokens]
    grid = (1, size[1] // 32, size[0] // 32)
    spans = [ImageSpan(int(start), tokens, grid=grid) for start in starts]
    assert len(spans) == 2
    assert np.array_equal(row.positions, row_positions(len(row.ids), spans).prompt)


def test_mirrored_pictures_have_mirrored_positions() -> None:
    plain = shown(Random(1), (224, 224))._replace(across=False, down=False)
    writer = Writer(TOKENIZER)
    first, second = (
        writer.prompt(plain._replace(across=across), "hello").positions for across in (False, True)
    )
    assert np.array_equal(first[:2], second[:2])
    line = slice(*np.flatnonzero(first[1] != first[2])[[0, -1]])
    assert not np.array_equal(first[2, line], second[2, line])
    assert sorted(first[2]) == sorted(second[2])


def test_only_answers_and_their_ends_are_learned() -> None:
    row = Writer(TOKENIZER).conversation(Random(4), (shown(Random(5), (224, 224)),))
    text = TOKENIZER.decode(row.ids[row.answers].tolist(), skip_special_tokens=False)
    whole = TOKENIZER.decode(row.ids.tolist(), skip_special_tokens=False)
    answers = [part.split("<|im_end|>")[0] for part in whole.split("<|im_start|>assistant\n")[1:]]
    assert text == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_a_batch_names_the_places_of_its_pictures() -> None:
    shape = Shape(6, 3)
    memory = mmap(-1, shape.nbytes)
    size = Filler(TOKENIZER, 1, shape).fill(memory)
    arrays = shape.views(memory, size)
    assert arrays["ids"].shape == (6, LENGTH)
    assert (arrays["ids"].reshape(-1)[arrays["where"]] == PAD).all()
    assert len(arrays["where"]) == np.count_nonzero(arrays["ids"] == PAD)
    assert arrays["pixels"].shape[0] == 9
    assert arrays["pixels"].std() > 10
    del arrays


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


def test_a_blank_picture_has_the_size_of_the_one_it_stands_for() -> None:
    prompts = held_out_prompts(1)
    for prompt, blank in zip(prompts, blanked(prompts), strict=True):
        assert blank.pixels.shape == prompt.pixels.shape
        assert blank.pixels.std() == 0 < prompt.pixels.std()
        assert blank[:3] == prompt[:3]


def test_wrong_shows_only_what_was_wrong() -> None:
    prompts = held_out_prompts(1)
    answers = ["nope", *(p.expected for p in prompts[1:])]
    assert wrong(prompts, answers).splitlines() == [
        f"{prompts[0].group}: {prompts[0].text}",
        f"  wanted {prompts[0].expected}",
        "  got    nope",
    ]
