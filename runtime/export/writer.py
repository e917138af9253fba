"""Files written piece by piece, so that memory does not grow with the model, and their progress."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# Readers map a tensor straight from the file when it begins at a page.
ALIGNMENT = 4096
_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}


class DataFile:
    """A file of tensors, each beginning at a multiple of `alignment`.

    `written` gets the bytes of every piece.
    """

    def __init__(
        self, file: BinaryIO, written: Callable[[int], None], alignment: int = ALIGNMENT
    ) -> None:
        self._file = file
        self._written = written
        self._alignment = alignment

    def append(self, pieces: Iterable[Array]) -> tuple[int, int]:
        """Write the pieces of one tensor one after the other; its offset and length in bytes."""
        offset = -(-self._file.tell() // self._alignment) * self._alignment
        self._file.write(bytes(offset - self._file.tell()))
        for piece in pieces:
            self._file.write(_bytes(piece))
            self._written(piece.nbytes)
        return offset, self._file.tell() - offset


class TensorPieces(NamedTuple):
    """Type, shape and content of a tensor; the pieces follow each other along the first axis."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Iterable[Array]


def write_safetensors(path: Path, tensors: dict[str, TensorPieces]) -> dict[str, int]:
    """Write a safetensors file from pieces; where each tensor begins, in bytes from the start."""
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape, _) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype.name],
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header).encode()
    begin = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    with path.open("wb") as file:
        file.write((begin - 8).to_bytes(8, "little") + text.ljust(begin - 8))
        for _, _, pieces in tensors.values():
            for piece in pieces:
                file.write(_bytes(piece))
    return {name: begin + entry["data_offsets"][0] for name, entry in header.items()}


def _bytes(piece: Array) -> memoryview:
    return np.ascontiguousarray(piece).view(np.uint8).data


Progress = Callable[[str, int, int], None]


class ProgressCounter:
    """Count the bytes of one stage and report them; `done` never exceeds `total`."""

    def __init__(self, progress: Progress | None, stage: str, total: int) -> None:
        self._progress = progress
        self._stage = stage
        self._total = total
        self._done = 0
        self.add(0)

    def add(self, count: int) -> None:
        """Count bytes that are now done."""
        self._done = min(self._done + count, self._total)
        if self._progress is not None:
            self._progress(self._stage, self._done, self._total)

    def finish(self) -> None:
        """Count all bytes that are left."""
        self.add(self._total)

    def over(self, pieces: Iterable[Array]) -> Iterator[Array]:
        """Yield `pieces`, each counted once the next is requested."""
        for piece in pieces:
            yield piece
            self.add(piece.nbytes)
