"""Batches of pictures and of text, made by processes of their own while the model trains."""

import multiprocessing as mp
import os
import queue
import threading
from collections.abc import Callable
from mmap import mmap
from random import Random
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer

from models.stream import batches
from models.vision.rows import Arrays, Filler, Shape

TEXT_WIDTHS: Final = (128, 192, 256, 384, 512)
_TEXTS_AHEAD: Final = 48
_PATIENCE: Final = 120  # seconds for a first batch
_FEWEST: Final = 64  # batches that are kept before one is taken again
_PICTURE_BYTES: Final = 12 << 30
_TEXTS: Final = 4000

Batch = dict[str, torch.Tensor]


def _draw(text: str, seed: int, shape: Shape, slots: list[mmap], ends: tuple[Any, Any]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    filler = Filler(Tokenizer.from_str(text), seed, shape)
    free, full = ends
    while True:
        slot = free.get()
        full.put((slot, filler.fill(slots[slot])))


def text_shape(width: int, tokens: int) -> tuple[int, int]:
    """Return rows and width of a batch of text: one of few shapes, but for very long rows."""
    width = next((known for known in TEXT_WIDTHS if known >= width), width)
    return max(1, tokens // width), width


def _talk(text: str, seed: int, tokens: int, out: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for batch in batches(Tokenizer.from_str(text), seed, tokens):
        shape = text_shape(batch.ids.shape[1], tokens)
        ids, answers = np.zeros(shape, np.int16), np.zeros(shape, np.bool_)
        rows, width = min(shape[0], len(batch.ids)), batch.ids.shape[1]
        ids[:rows, :width], answers[:rows, :width] = batch.ids[:rows], batch.answers[:rows]
        out.put((ids, answers))


class Supply:
    """Batches on the device: fresh ones as they come, else one of those that came before."""

    def __init__(self, device: torch.device, most: int, seed: int) -> None:
        self._device, self._most, self._rng = device, most, Random(seed)
        self._ready: queue.Queue[Batch] = queue.Queue(4)
        self._kept: list[Batch] = []
        self.fresh = self.again = 0

    def feed(self, take: Callable[[], tuple[Arrays, Callable[[], None]]]) -> None:
        """Bring what `take` returns to the device, and call what comes with it, without end."""
        side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        while True:
            arrays, done = take()
            if side is None:
                batch = {name: torch.tensor(array) for name, array in arrays.items()}
            else:
                with torch.cuda.stream(side):
                    batch = {n: torch.from_numpy(a).to(self._device) for n, a in arrays.items()}
                side.synchronize()
            done()
            self._ready.put(batch)

    def take(self) -> Batch:
        """Return a batch. Raises queue.Empty when none comes in time for the first ones."""
        wait = len(self._kept) < _FEWEST
        try:
            batch = self._ready.get(block=wait, timeout=_PATIENCE)
        except queue.Empty:
            if wait:
                raise
            self.again += 1
            return self._rng.choice(self._kept)
        self.fresh += 1
        if self._device.type == "cuda":  # not to be overwritten before what uses it has run
            for tensor in batch.values():
                tensor.record_stream(torch.cuda.current_stream(self._device))
        if len(self._kept) < self._most:
            self._kept.append(batch)
        else:
            self._kept[self._rng.randrange(self._most)] = batch
        return batch


class Stream:
    """The processes, three of four for pictures, and what they supply."""

    def __init__(self, text: str, shape: Shape, tokens: int, workers: int, seed: int) -> None:
        """Start the processes with this tokenizer, which must be before CUDA is."""
        fork = mp.get_context("fork")
        self.shape, self._seed = shape, seed
        self._slots = [mmap(-1, shape.nbytes) for _ in range(2 * workers + 2)]
        self._free, self._full = fork.SimpleQueue(), fork.SimpleQueue()
        self._texts = fork.Queue(_TEXTS_AHEAD)
        for slot in range(len(self._slots)):
            self._free.put(slot)
        talkers = max(1, workers // 4)
        ends = (self._free, self._full)
        self._processes = []
        for index in range(max(1, workers - talkers)):
            drawn = (text, seed * 1000 + index, shape, self._slots, ends)
            self._processes.append(fork.Process(target=_draw, args=drawn, daemon=True))
        for index in range(talkers):
            said = (text, seed * 1000 + 500 + index, tokens, self._texts)
            self._processes.append(fork.Process(target=_talk, args=said, daemon=True))
        for process in self._processes:
            process.start()

    def start(self, device: torch.device) -> None:
        """Begin to take batches to the device."""
        self.pictures = Supply(device, _PICTURE_BYTES // self.shape.nbytes, self._seed)
        self.texts = Supply(device, _TEXTS, self._seed)
        for supply, take in ((self.pictures, self._picture), (self.texts, self._text)):
            threading.Thread(target=supply.feed, args=(take,), daemon=True).start()

    def _picture(self) -> tuple[Arrays, Callable[[], None]]:
        slot, size = self._full.get()
        return self.shape.views(self._slots[slot], size), lambda: self._free.put(slot)

    def _text(self) -> tuple[Arrays, Callable[[], None]]:
        ids, answers = self._texts.get()
        return {"ids": ids.astype(np.int64), "answers": answers}, lambda: None

    def check(self) -> None:
        """Raise RuntimeError where a process has ended: the rest would learn from too little."""
        if not all(process.is_alive() for process in self._processes):
            raise RuntimeError("a process that makes batches has ended")

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
