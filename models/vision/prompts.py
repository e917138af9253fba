"""The held-out questions about pictures, and how answers to them are scored."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from models.evaluate import Score
from models.vision.drawing import Pixels, draw_scene
from models.vision.questions import GROUPS, question
from models.vision.rows import MAKERS
from models.vision.scenes import anything
from models.vision.things import is_held_out

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
