"""Conversations about pictures as token ids, with the positions of Qwen3-VL."""

from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from models.chances import likely, weighted
from models.conversations import random_system
from models.domain import Context
from models.homes import mixed_names, random_home
from models.tokenizer import END, START
from models.vision.drawing import CELL, Picture, draw_scene
from models.vision.questions import Question, question
from models.vision.scenes import (
    Allowed,
    Scene,
    crowd,
    gauges,
    in_training,
    objects,
    signs,
)

IMAGE: Final = "<|image_pad|>"
VISION_START: Final = "<|vision_start|>"
VISION_END: Final = "<|vision_end|>"
LENGTH: Final = 208  # tokens of a training row
_KINDS: Final = {"objects": 0.43, "crowd": 0.16, "signs": 0.27, "gauges": 0.14}
_MIRRORED: Final = 0.15
_SYSTEM: Final = range(8, 80)  # tokens of a system prompt that leaves room
_ROOM: Final = 104  # tokens of a second picture and a question
_ATTEMPTS: Final = 10

Ints = npt.NDArray[np.int64]
MAKERS: Final[dict[str, Callable[[Random, tuple[int, int], Allowed], Scene]]] = {
    "objects": objects,
    "crowd": crowd,
    "signs": signs,
    "gauges": gauges,
}


class Shown(NamedTuple):
    """A picture, and whether its merged patches get the positions of its mirror image."""

    scene: Scene
    picture: Picture
    across: bool
    down: bool

    @property
    def grid(self) -> tuple[int, int]:
        """Return its rows and columns of merged patches."""
        return self.scene.height // CELL, self.scene.width // CELL


class Row(NamedTuple):
    """A conversation: ids [L], which of them are answers [L], positions [3, L], its pictures."""

    ids: Ints
    answers: npt.NDArray[np.bool_]
    positions: Ints
    shown: tuple[Shown, ...]


def shown(rng: Random, size: tuple[int, int]) -> Shown:
    """Return a picture to train on.

    In some the picture is drawn mirrored, things upright, and its positions are mirrored back:
    where a thing is can then be learned from the decoder's positions alone.
    """
    scene = MAKERS[weighted(rng, _KINDS)](rng, size, in_training)
    across = down = False
    if scene.group == "objects" and likely(rng, _MIRRORED):
        across, down = rng.choice(((True, False), (False, True), (True, True)))
    drawn = scene.mirrored(across=across, down=down)
    return Shown(scene, draw_scene(rng, drawn), across, down)


class Writer:
    """Builder of rows, one after another."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._image = self._encode(IMAGE)
        self._ids: list[int] = []
        self._answers: list[bool] = []
        self._positions: list[Ints] = []
        self._next = 0

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def _add(self, ids: list[int], *, answer: bool = False) -> None:
        self._ids += ids
        self._answers += [answer] * len(ids)
        step = np.arange(self._next, self._next + len(ids))
        self._positions.append(np.broadcast_to(step, (3, len(ids))))
        self._next += len(ids)

    def _add_picture(self, picture: Shown) -> None:
        rows, columns = picture.grid
        self._add(self._encode(VISION_START))
        self._ids += self._image * (rows * columns)
        self._answers += [False] * (rows * columns)
        down, across = np.divmod(np.arange(rows * columns), columns)
        if picture.down:
            down = rows - 1 - down
        if picture.across:
            across = columns - 1 - across
        self._positions.append(self._next + np.stack([np.zeros_like(down), down, across]))
        self._next += max(rows, columns)
        self._add(self._encode(VISION_END))

    def _add_user(self, text: str, picture: Shown | None) -> None:
        self._add(self._encode(f"{START}user\n"))
        if picture is not None:
            self._add_picture(picture)
        self._add(self._encode(f"{text}{END}\n{START}assistant\n"))

    def _fits(self, asked: Question, room: int) -> bool:
        text = f"{START}user\n{asked.text}{END}\n{START}assistant\n{asked.answer}{END}\n"
        return len(self._ids) + len(self._encode(text)) <= room

    def _take(self, pictures: tuple[Shown, ...]) -> Row:
        row = Row(
            np.array(self._ids),
            np.array(self._answers),
            np.concatenate(self._positions, 1),
            pictures,
        )
        self._ids, self._answers, self._positions, self._next = [], [], [], 0
        return row

    def prompt(self, picture: Shown, text: str) -> Row:
        """Return the row up to where the answer begins."""
        self._add_user(text, picture)
        return self._take((picture,))

    def conversation(self, rng: Random, pictures: tuple[Shown, ...]) -> Row:
        """Return a row of about `LENGTH` tokens: the pictures, each with questions about it."""
        system = self._encode(f"{START}system\n{_system(rng)}{END}\n")
        if len(system) in _SYSTEM and len(pictures) == 1:
            self._add(system)
        for index, picture in enumerate(pictures):
            last = index + 1 == len(pictures)
            self._ask(rng, picture, LENGTH if last else LENGTH - _ROOM)
        return self._take(pictures)

    def _ask(self, rng: Random, picture: Shown, room: int) -> None:
        fresh: Shown | None = picture
        answered: set[str] = set()
        for _ in range(_ATTEMPTS):
            asked = question(rng, picture.scene)
            if asked.answer in answered or not (fresh or self._fits(asked, room)):
                continue
            answered.add(asked.answer)
            self._add_user(asked.text, fresh)
            self._add(self._encode(f"{asked.answer}{END}"), answer=True)
            self._add(self._encode("\n"))
            fresh = None


def _system(rng: Random) -> str:
    if likely(rng, 0.6):
        return ""
    listed = likely(rng, 0.3)
    home = random_home(rng, rng.randrange(2, 4), mixed_names(rng))
    return random_system(rng, Context(home, listed=listed))
