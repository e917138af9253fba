"""Batches of pictures and of text, made by processes of their own while the model trains."""

import multiprocessing as mp
import os
import queue
import threading
from dataclasses import dataclass
from mmap import mmap
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from models.stream import batches
from models.vision.drawing import CELL, CLASSES
from models.vision.rows import IMAGE, LENGTH, Writer, shown

SIZES: Final = ((224, 224), (256, 192), (192, 256))  # width and height
_SIZE_SHARES: Final = (0.7, 0.15, 0.15)
_TEXTS_AHEAD: Final = 48
_PATIENCE: Final = 120  # seconds for the first batches
_POOL_BYTES: Final = 30 << 30


@dataclass(frozen=True)
class Shape:
    """How large a batch is: rows, and how many of them show a second picture."""

    rows: int
    twice: int

    @property
    def pictures(self) -> int:
        """Return the pictures of a batch."""
        return self.rows + self.twice

    def fields(self, size: int) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
        """Return shape and type of every array of a batch with pictures of this size."""
        width, height = SIZES[size]
        rows, columns = height // CELL, width // CELL
        return {
            "pixels": ((self.pictures, height, width, 3), np.uint8),
            "seen": ((self.pictures, rows * columns, len(CLASSES)), np.uint8),
            "ids": ((self.rows, LENGTH), np.int64),
            "answers": ((self.rows, LENGTH), np.bool_),
            "positions": ((3, self.rows, LENGTH), np.int64),
            "where": ((self.pictures * rows * columns,), np.int64),
        }

    def views(self, memory: mmap, size: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a batch in this memory, one behind another."""
        found, offset = {}, 0
        for name, (shape, kind) in self.fields(size).items():
            count = int(np.prod(shape))
            found[name] = np.frombuffer(memory, kind, count, offset).reshape(shape)
            offset += -(-count * np.dtype(kind).itemsize // 64) * 64
        return found

    @property
    def nbytes(self) -> int:
        """Return the bytes that the largest batch takes."""
        return max(
            sum(-(-int(np.prod(s)) * np.dtype(k).itemsize // 64) * 64 for s, k in fields.values())
            for fields in map(self.fields, range(len(SIZES)))
        )


def fill(
    writer: Writer,
    rng: Random,
    shape: Shape,
    arrays: dict[str, npt.NDArray[Any]],
    size: int,
    image: int,
) -> None:
    """Make one batch in these arrays; ids are padded with 0 and positions go on."""
    arrays["ids"][:] = 0
    arrays["answers"][:] = False
    place = 0
    for index in range(shape.rows):
        number = 2 if index < shape.twice else 1
        row = writer.conversation(rng, tuple(shown(rng, SIZES[size]) for _ in range(number)))
        length = len(row.ids)
        arrays["ids"][index, :length] = row.ids
        arrays["answers"][index, :length] = row.answers
        arrays["positions"][:, index] = np.arange(LENGTH)
        arrays["positions"][:, index, :length] = row.positions
        for picture in row.shown:
            arrays["pixels"][place] = picture.picture.pixels
            seen = picture.picture.seen
            arrays["seen"][place] = seen.reshape(-1, seen.shape[2])
            place += 1
    arrays["where"][:] = np.flatnonzero(arrays["ids"] == image)


def _draw(text: str, seed: int, shape: Shape, slots: list[mmap], free: Any, full: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_str(text)
    writer, rng = Writer(tokenizer), Random(seed)
    image = tokenizer.token_to_id(IMAGE)
    while (slot := free.get()) is not None:
        size = rng.choices(range(len(SIZES)), _SIZE_SHARES)[0]
        fill(writer, rng, shape, shape.views(slots[slot], size), size, image)
        full.put((slot, size))


def _talk(text: str, seed: int, tokens: int, out: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for batch in batches(Tokenizer.from_str(text), seed, tokens):
        out.put((batch.ids.astype(np.int16), batch.answers))


Batch = dict[str, torch.Tensor]


class Stream:
    """Fresh batches as they come, and earlier ones again where the processes cannot keep up."""

    def __init__(self, tokenizer: Tokenizer, shape: Shape, tokens: int, workers: int, seed: int):
        """Start the processes, which must be done before CUDA is."""
        fork = mp.get_context("fork")
        text = tokenizer.to_str()
        self.shape, self.fresh, self.again = shape, 0, 0
        self._slots = [mmap(-1, shape.nbytes) for _ in range(2 * workers + 2)]
        self._free, self._full = fork.SimpleQueue(), fork.SimpleQueue()
        self._texts = fork.Queue(_TEXTS_AHEAD)
        for slot in range(len(self._slots)):
            self._free.put(slot)
        talkers = max(1, workers // 4)
        drawn = (text, shape, self._slots, self._free, self._full)
        self._processes = [
            fork.Process(target=_draw, args=(text, seed * 1000 + i, *drawn[1:]), daemon=True)
            for i in range(max(1, workers - talkers))
        ] + [
            fork.Process(
                target=_talk, args=(text, seed * 1000 + 500 + i, tokens, self._texts), daemon=True
            )
            for i in range(talkers)
        ]
        for process in self._processes:
            process.start()
        self._ready: queue.Queue[Batch] = queue.Queue(3)
        self._ready_texts: queue.Queue[Batch] = queue.Queue(8)
        self._pool: list[Batch] = []
        self._rng = Random(seed)
        self._talks: list[Batch] = []

    def start(self, device: str) -> None:
        """Begin to take batches to the device."""
        self._device = device
        threading.Thread(target=self._fetch, daemon=True).start()
        threading.Thread(target=self._fetch_text, daemon=True).start()

    def _move(self, arrays: dict[str, npt.NDArray[Any]], side: Any) -> Batch:
        if side is None:
            return {name: torch.tensor(a) for name, a in arrays.items()}
        with torch.cuda.stream(side):
            batch = {name: torch.from_numpy(a).to(self._device) for name, a in arrays.items()}
        side.synchronize()
        return batch

    def _fetch(self) -> None:
        side = torch.cuda.Stream() if self._device == "cuda" else None
        while True:
            slot, size = self._full.get()
            batch = self._move(self.shape.views(self._slots[slot], size), side)
            self._free.put(slot)
            self._ready.put(batch)

    def _fetch_text(self) -> None:
        side = torch.cuda.Stream() if self._device == "cuda" else None
        while True:
            ids, answers = self._texts.get()
            self._ready_texts.put(
                self._move({"ids": ids.astype(np.int64), "answers": answers}, side)
            )

    def _ours(self, batch: Batch) -> Batch:
        if self._device == "cuda":  # not to be overwritten before what uses it has run
            for tensor in batch.values():
                tensor.record_stream(torch.cuda.current_stream())
        return batch

    def pictures(self) -> Batch:
        """Return a batch about pictures."""
        try:
            batch = (
                self._ready.get_nowait()
                if len(self._pool) > 64
                else self._ready.get(timeout=_PATIENCE)
            )
        except queue.Empty:
            self.again += 1
            return self._rng.choice(self._pool)
        self.fresh += 1
        self._ours(batch)
        most = _POOL_BYTES // self.shape.nbytes
        if len(self._pool) < most:
            self._pool.append(batch)
        else:
            self._pool[self._rng.randrange(most)] = batch
        return batch

    def text(self) -> Batch:
        """Return a batch of the text model's own conversations."""
        try:
            found = (
                self._ready_texts.get_nowait()
                if len(self._talks) > 64
                else self._ready_texts.get(timeout=_PATIENCE)
            )
        except queue.Empty:
            return self._rng.choice(self._talks)
        self._ours(found)
        if len(self._talks) < 4000:
            self._talks.append(found)
        else:
            self._talks[self._rng.randrange(4000)] = found
        return found

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
