"""One batch about pictures, written into memory that processes share."""

from dataclasses import dataclass
from mmap import mmap
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from models.vision.drawing import CELL, CLASSES
from models.vision.rows import IMAGE, LENGTH, Row, Writer, shown

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
