"""Questions about a scene with their only right answers, and those held out of training."""

import json
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from models.domain import likely, weighted
from models.evaluate import Score
from models.vision.drawing import Pixels, draw_scene
from models.vision.scenes import (
    CELLS,
    DEVICES,
    MAKERS,
    SHAPES,
    Scene,
    Sign,
    Thing,
    anything,
    is_held_out,
)

GROUPS: Final = ("colours", "counts", "dials", "icons", "positions", "shapes", "words")
_SIDES: Final = {
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}
_HALVES: Final = {
    "in the left half": (0, (0, 1)),
    "in the right half": (0, (2, 3)),
    "in the top half": (1, (0, 1)),
    "in the bottom half": (1, (2, 3)),
}
_ACTIONS: Final = {"Turn on": "turn_on", "Turn off": "turn_off"}


class Question(NamedTuple):
    """Question about a picture, its answer, and the combination that it is about."""

    group: str
    text: str
    answer: str
    combination: tuple[object, ...]


def _at(thing: Thing) -> str:
    return CELLS[thing.row * 3 + thing.column]


def _name(thing: Thing) -> str:
    return f"{thing.colour} {thing.kind}"


def _colour(rng: Random, thing: Thing) -> Question:
    if likely(rng, 0.5):
        noun = "shape" if thing.kind in SHAPES else "device"
        text = rng.choice(("What colour is the {} {}?", "Which colour has the {} {}?"))
        return Question(
            "colours", text.format(noun, _at(thing)), f"It is {thing.colour}.", thing[:4]
        )
    text = rng.choice(("What colour is the {}?", "Which colour does the {} have?"))
    answer = f"The {thing.kind} is {thing.colour}."
    return Question("colours", text.format(thing.kind), answer, thing[:4])


def _kind(rng: Random, thing: Thing, scene: Scene) -> Question:
    family = SHAPES if thing.kind in SHAPES else DEVICES
    group, noun = ("shapes", "shape") if family is SHAPES else ("icons", "device")
    alike = [t for t in scene.things if t.colour == thing.colour and t.kind in family]
    text = f"What {noun} is {_at(thing)}?"
    if len(alike) == 1 and likely(rng, 0.4):
        text = rng.choice(
            (f"What {noun} is {thing.colour}?", f"What is the {thing.colour} {noun}?")
        )
    answer = f"It is a {thing.kind}."
    if group == "icons" and likely(rng, 0.4):
        verb = rng.choice(list(_ACTIONS))
        text = f"{verb} the device {_at(thing)}"
        action = {"action": _ACTIONS[verb], "device": thing.kind}
        answer = json.dumps(action, separators=(",", ":"))
    return Question(group, text, answer, thing[:4])


def _position(rng: Random, thing: Thing, scene: Scene) -> Question:
    by_cell = {(t.column, t.row): t for t in scene.things}
    beside = [
        (side, by_cell[thing.column - across, thing.row - down])
        for side, (across, down) in _SIDES.items()
        if (thing.column - across, thing.row - down) in by_cell
    ]
    if beside and likely(rng, 0.4):
        side, other = rng.choice(beside)
        text = f"What is {side} the {rng.choice((_name(other), other.kind))}?"
        return Question("positions", text, f"The {_name(thing)}.", thing[:4])
    text = f"Where is the {rng.choice((_name(thing), thing.kind))}?"
    return Question("positions", text, f"The {_name(thing)} is {_at(thing)}.", thing[:4])


def _about_objects(rng: Random, scene: Scene) -> Question:
    thing = rng.choice(scene.things)
    group = weighted(rng, {"colour": 0.25, "kind": 0.35, "position": 0.4})
    if group == "colour":
        return _colour(rng, thing)
    return _kind(rng, thing, scene) if group == "kind" else _position(rng, thing, scene)


def _number(count: int, thing: Thing) -> str:
    if count == 1:
        return f"There is 1 {_name(thing)}"
    plural = f"{_name(thing)}es" if thing.kind == "cross" else f"{_name(thing)}s"
    return f"There are {count or 'no'} {plural}"


def _about_crowd(rng: Random, scene: Scene) -> Question:
    thing = rng.choice(sorted({t[:2] for t in scene.things}))
    alike = [t for t in scene.things if t[:2] == thing]
    plural = _number(2, alike[0]).removeprefix("There are 2 ")
    combination = ("count", *thing, len(alike))
    if likely(rng, 0.35):
        where = rng.choice(list(_HALVES))
        axis, cells = _HALVES[where]
        there = [t for t in alike if (t.column, t.row)[axis] in cells]
        text = f"How many {plural} are {where}?"
        return Question("counts", text, f"{_number(len(there), alike[0])} {where}.", combination)
    text = rng.choice((f"How many {plural} are there?", f"How many {plural} can you see?"))
    return Question("counts", text, f"{_number(len(alike), alike[0])}.", combination)


def _about_signs(rng: Random, scene: Scene) -> Question:
    index = rng.randrange(len(scene.signs))
    sign: Sign = scene.signs[index]
    which = "" if len(scene.signs) == 1 else ("upper ", "lower ")[index]
    combination = ("sign", sign.text, sign.dark, len(scene.signs), index)
    text = rng.choice(("What does the {}sign say?", "Read the {}sign", "What is on the {}sign?"))
    return Question("words", text.format(which), f"It says {sign.text}.", combination)


def _about_gauges(rng: Random, scene: Scene) -> Question:
    index = rng.randrange(len(scene.gauges))
    gauge = scene.gauges[index]
    alone = sum(g.kind == gauge.kind for g in scene.gauges) == 1
    which = "" if alone else ("left ", "right ")[index]
    combination = ("gauge", gauge.kind, gauge.colour, gauge.value)
    if gauge.kind == "dial":
        text = rng.choice(("What does the {}dial read?", "Read the {}dial"))
        return Question("dials", text.format(which), f"It reads {gauge.reading}.", combination)
    text = rng.choice(("What does the {}thermometer show?", "How warm is it on the {}thermometer?"))
    return Question("dials", text.format(which), f"It shows {gauge.reading} degrees.", combination)


_ABOUT: Final = {
    "objects": _about_objects,
    "crowd": _about_crowd,
    "signs": _about_signs,
    "gauges": _about_gauges,
}


def question(rng: Random, scene: Scene) -> Question:
    """Return a question that the scene answers."""
    return _ABOUT[scene.group](rng, scene)


SIZE: Final = (224, 224)
_SEED: Final = 11
_ATTEMPTS: Final = 8
_SCENES: Final = {"counts": "crowd", "dials": "gauges", "words": "signs"}


class Prompt(NamedTuple):
    """A question about a picture [H, W, 3], and the one right answer."""

    group: str
    text: str
    expected: str
    pixels: Pixels


def _prompt(rng: Random, group: str) -> Prompt:
    make = MAKERS[_SCENES.get(group, "objects")]
    while True:
        scene = make(rng, SIZE, anything)
        for _ in range(_ATTEMPTS):
            asked = question(rng, scene)
            if asked.group == group and is_held_out(*asked.combination):
                return Prompt(group, asked.text, asked.answer, draw_scene(rng, scene).pixels)


def held_out_prompts(each: int) -> list[Prompt]:
    """Return so many questions of each group, about combinations that training never showed."""
    rng = Random(_SEED)
    return [_prompt(rng, group) for group in GROUPS for _ in range(each)]


def score(prompts: Sequence[Prompt], answers: Sequence[str]) -> dict[str, Score]:
    """Return the exact matches by group, and over all."""
    total = Counter(prompt.group for prompt in prompts)
    pairs = zip(prompts, answers, strict=True)
    right = Counter(p.group for p, answer in pairs if answer.strip() == p.expected)
    scores = {group: Score(right[group], total[group]) for group in GROUPS}
    return {**scores, "all": Score(right.total(), total.total())}


def table(scores: dict[str, dict[str, Score]]) -> str:
    """Return one line for each way of asking, and one column for each group, in per cent."""
    lines = [" " * 14 + "".join(f"{group:>10}" for group in (*GROUPS, "all"))]
    for name, found in scores.items():
        shares = (f"{100 * found[group].share:10.1f}" for group in (*GROUPS, "all"))
        lines.append(f"{name:14}" + "".join(shares))
    return "\n".join(lines)
