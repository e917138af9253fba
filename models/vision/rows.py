"""Conversations about pictures as token ids, with the positions of Qwen3-VL; batches of them."""

import json
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from models.conversations import mixed_names, random_home, random_system
from models.domain import Context, likely, weighted
from models.stream import END, START
from models.vision.drawing import CELL, CLASSES, Picture, draw_scene
from models.vision.questions import Question, question
from models.vision.scenes import MAKERS, Scene, in_training

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


VIDEO: Final = "<|video_pad|>"
# The tokens of vision take the places of bytes that no UTF-8 text has, so that all ids keep theirs.
TOKENS: Final = {VISION_START: "ü", VISION_END: "ý", IMAGE: "þ", VIDEO: "ÿ"}


def vision_tokenizer(text: Path) -> Tokenizer:
    """Return the tokenizer of the text model's folder with the four tokens of vision."""
    tree = json.loads((text / "tokenizer.json").read_text("utf-8"))
    vocabulary = tree["model"]["vocab"]
    for token, byte in TOKENS.items():
        vocabulary[token] = vocabulary.pop(byte)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = {"id": vocabulary[token], "content": token, **flags, "special": True}
        tree["added_tokens"].append(added)
    tree["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda entry: entry[1]))
    return Tokenizer.from_str(json.dumps(tree))


SIZES: Final = ((224, 224), (256, 192), (192, 256))  # width and height
_SIZE_SHARES: Final = (0.7, 0.15, 0.15)
_LINE: Final = 64  # bytes to which arrays are aligned

Arrays = dict[str, npt.NDArray[Any]]


def random_size(rng: Random) -> int:
    """Return which of `SIZES` the pictures of a batch have."""
    return rng.choices(range(len(SIZES)), _SIZE_SHARES)[0]


@dataclass(frozen=True)
class Shape:
    """Size of a batch: number of rows, and number of those with a second picture."""

    rows: int
    twice: int

    @property
    def pictures(self) -> int:
        """Return the pictures of a batch."""
        return self.rows + self.twice

    def _fields(self, size: int) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
        width, height = SIZES[size]
        merged = (height // CELL) * (width // CELL)
        return {
            "pixels": ((self.pictures, height, width, 3), np.uint8),
            "seen": ((self.pictures, merged, len(CLASSES)), np.uint8),
            "ids": ((self.rows, LENGTH), np.int64),
            "answers": ((self.rows, LENGTH), np.bool_),
            "positions": ((3, self.rows, LENGTH), np.int64),
            "where": ((self.pictures * merged,), np.int64),
        }

    def views(self, memory: mmap, size: int) -> Arrays:
        """Return the arrays of a batch in this memory, one behind another.

        `pixels` and `seen` are of pictures; `ids`, `answers` and `positions` of rows; `where` the
        places of image tokens in the flattened ids.
        """
        found, offset = {}, 0
        for name, (shape, kind) in self._fields(size).items():
            found[name] = np.ndarray(shape, kind, memory, offset)
            offset += -(-found[name].nbytes // _LINE) * _LINE
        return found

    @property
    def nbytes(self) -> int:
        """Return the bytes that the largest batch takes."""
        return max(
            sum(
                -(-int(np.prod(shape)) * np.dtype(kind).itemsize // _LINE) * _LINE
                for shape, kind in self._fields(size).values()
            )
            for size in range(len(SIZES))
        )


class Filler:
    """Filler of batches, from one seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int, shape: Shape) -> None:
        self._writer = Writer(tokenizer)
        self._image = tokenizer.token_to_id(IMAGE)
        self._rng = Random(seed)
        self._shape = shape

    def _row(self, size: tuple[int, int], number: int) -> Row:
        while True:
            pictures = tuple(shown(self._rng, size) for _ in range(number))
            row = self._writer.conversation(self._rng, pictures)
            if len(row.ids) <= LENGTH:  # few are longer: two pictures with long words
                return row

    def fill(self, memory: mmap) -> int:
        """Make a batch in this memory, and return which of `SIZES` it has.

        Rows are padded with 0, and their positions go on.
        """
        size = random_size(self._rng)
        arrays = self._shape.views(memory, size)
        arrays["ids"][:] = 0
        arrays["answers"][:] = False
        arrays["positions"][:] = np.arange(LENGTH)
        place = 0
        for index in range(self._shape.rows):
            number = 2 if index < self._shape.twice else 1
            row = self._row(SIZES[size], number)
            length = len(row.ids)
            arrays["ids"][index, :length] = row.ids
            arrays["answers"][index, :length] = row.answers
            arrays["positions"][:, index, :length] = row.positions
            for picture in row.shown:
                arrays["pixels"][place] = picture.picture.pixels
                arrays["seen"][place] = picture.picture.seen.reshape(-1, len(CLASSES))
                place += 1
        arrays["where"][:] = np.flatnonzero(arrays["ids"] == self._image)
        return size
