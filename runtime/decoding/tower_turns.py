"""A vision tower between the steps of rows: which patches are next, and when."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.device.device import Device
from runtime.device.stream import Mark
from runtime.errors import HearthError
from runtime.images import ImageLayout
from runtime.rows import DecodingRow
from runtime.steps.image_merge import MultimodalMetrics
from runtime.vision.calls import Call, Piece, pieces_of, shared_patches, take_call
from runtime.vision.vision_runner import VisionRunner

_KEPT = 0.9
"""How much of what was measured before is left when another step is recorded."""


class TowerWork(NamedTuple):
    """Patches of a picture, and where its embeddings go; `number` is the caller's."""

    number: int
    layout: ImageLayout
    patches: NDArray[np.uint8]
    out: NDArray[Any]


class TowerResult(NamedTuple):
    """The embeddings of a picture are there, after so many seconds of the tower, or an error is."""

    number: int
    engine_s: float
    error: HearthError | None = None


class TowerBudget:
    """Keeps the tower to its share beside rows that decode; no clock.

    What it takes is paid by decode steps, each with `share` of its own time, before its next turn.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._decode_s = 0.0
        self._owed_s = 0.0
        self._seconds = 0.0
        self._patches = 0.0

    def record_decode(self, seconds: float) -> None:
        """Take note of a decode step or a round."""
        before = self._decode_s or seconds
        self._decode_s = _KEPT * before + (1 - _KEPT) * seconds
        self._owed_s = max(0.0, self._owed_s - self._share * seconds)

    def record_call(self, patches: int, seconds: float) -> None:
        """Take note of a call of the tower."""
        self._owed_s += seconds
        self._seconds = _KEPT * self._seconds + seconds
        self._patches = _KEPT * self._patches + patches

    @property
    def paid(self) -> bool:
        """Whether the calls of before have been paid for, all but a last decode step's share."""
        return self._owed_s <= self._share * self._decode_s

    def patches(self, most: int) -> int:
        """How many a call may take while rows decode, if its segments are as small."""
        if not self._patches or not self._decode_s:
            return most
        return min(most, int(self._share * self._decode_s * self._patches / self._seconds))


class PendingTower:
    """A call of the tower that was queued, as the queue of steps sees it: a step of no rows."""

    kind: Literal["tower"] = "tower"
    rows: Sequence[DecodingRow] = ()
    lengths: Sequence[int] = ()
    padding = 0

    def __init__(self, call: Call, started: float, ends: Mark | HearthError) -> None:
        self.call = call
        self.started = started
        self.host_s = time.monotonic() - started
        self.ends = ends


@dataclass(slots=True)
class _Picture:
    work: TowerWork
    pieces: int
    spent_s: float = 0.0
    alone: bool = False


class TowerTurns:
    """Runs calls of a tower, if there is one, and knows what became of each picture.

    One call is in flight at a time. One that fails over several pictures is repeated for each.
    """

    def __init__(
        self, runner: VisionRunner | None, device: Device, share: float, metrics: MultimodalMetrics
    ) -> None:
        self._given = runner
        self._metrics = metrics
        self._device = device
        self._budget = TowerBudget(share)
        self._pieces: deque[Piece] = deque()
        self._pictures: dict[int, _Picture] = {}
        self._in_flight = False
        self._was_last = False

    @property
    def _runner(self) -> VisionRunner:
        if self._given is None:
            raise HearthError("internal", "there is no vision tower on this device")
        return self._given

    @property
    def waits(self) -> bool:
        """Whether a picture is not done."""
        return bool(self._pictures)

    def add(self, work: TowerWork) -> None:
        """Take a picture, behind all others; raises `image_too_large`, `internal` with no tower."""
        pieces = pieces_of(work.number, work.layout, self._runner.config)
        self._pictures[work.number] = _Picture(work, len(pieces))
        self._pieces.extend(pieces)

    def due(self, *, decoding: bool, joining: bool) -> bool:
        """Whether the next step is the tower's; it and chunks of prompt take turns."""
        if not self._pieces or self._in_flight or (decoding and not self._budget.paid):
            return False
        return not (joining and self._was_last)

    def passed(self) -> None:
        """A chunk of prompt has its turn."""
        self._was_last = False

    def queue(self, *, decoding: bool) -> PendingTower:
        """Queue the next call; raises `device_lost`."""
        most = shared_patches(self._runner.config)
        if self._pictures[self._pieces[0].image].alone:
            most = 0
        elif decoding:
            most = self._budget.patches(most)
        call, started = take_call(self._pieces, most), time.monotonic()
        self._in_flight = self._was_last = True
        try:
            self._runner.queue(call, {n: one.work.patches for n, one in self._pictures.items()})
            return PendingTower(call, started, self._device.mark())
        except (HearthError, MemoryError) as error:
            return PendingTower(call, started, _failure(error))

    def collect(self, pending: PendingTower, began: float) -> list[TowerResult]:
        """Wait for a call that the device came to at `began`: the pictures that are done with it.

        Raises `device_lost`.
        """
        call, self._in_flight = pending.call, False
        try:
            if isinstance(pending.ends, HearthError):
                raise pending.ends
            pending.ends.wait()
            seconds = time.monotonic() - began
            self._runner.collect(call, {n: one.work.out for n, one in self._pictures.items()})
        except (HearthError, MemoryError) as error:
            return self._failed(call, _failure(error))
        self._budget.record_call(call.patches, seconds)
        self._metrics.encode_seconds += seconds
        done = []
        for piece in call.pieces:
            picture = self._pictures[piece.image]
            picture.pieces -= 1
            picture.spent_s += seconds * piece.segment.patches / call.patches
            if not picture.pieces:
                del self._pictures[piece.image]
                self._metrics.encoded += 1
                done.append(TowerResult(piece.image, picture.spent_s))
        return done

    def record_decode(self, seconds: float) -> None:
        """Take note of a decode step or a round."""
        self._budget.record_decode(seconds)

    def drop_all(self) -> None:
        """Forget all pictures: the engine has failed."""
        self._pieces.clear()
        self._pictures.clear()
        self._in_flight = False

    def _failed(self, call: Call, error: HearthError) -> list[TowerResult]:
        numbers = list(dict.fromkeys(piece.image for piece in call.pieces))
        if len(numbers) > 1:
            for number in numbers:
                self._pictures[number].alone = True
            self._pieces.extendleft(reversed(call.pieces))
            return []
        del self._pictures[numbers[0]]
        self._pieces = deque(piece for piece in self._pieces if piece.image != numbers[0])
        return [TowerResult(numbers[0], 0.0, error)]


def _failure(error: HearthError | MemoryError) -> HearthError:
    """What pictures failed by; raises `device_lost` again."""
    if isinstance(error, MemoryError):
        return HearthError("out_of_memory", "no memory for a picture: send a smaller one")
    if error.code == "device_lost":
        raise error
    return error
