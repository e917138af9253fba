"""Schedule of the vision encoder between the steps of rows."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.device import Device, StreamEvent
from hearth.runtime.errors import HearthError
from hearth.runtime.ewma import Ewma
from hearth.runtime.generation.in_flight import InFlightStep
from hearth.runtime.generation.step_times import StepTimes
from hearth.runtime.images import ImageLayout
from hearth.runtime.runner.image_merge import MultimodalMetrics
from hearth.runtime.vision.tower_inputs import Call, Piece, pieces_of, shared_patches, take_call
from hearth.runtime.vision.vision_runner import VisionRunner

_NEWEST = 0.1
"""Weight of the newest call in the moving averages of call costs."""


class TowerWork(NamedTuple):
    """Patches of a picture, and where its embeddings go; `number` is the caller's."""

    number: int
    layout: ImageLayout
    patches: NDArray[np.uint8]
    out: NDArray[Any]


class TowerResult(NamedTuple):
    """Result of a picture, whose embeddings are written unless `error` is set."""

    number: int
    engine_s: float
    error: HearthError | None = None


class TowerCall(NamedTuple):
    """Queued call of the vision encoder, and its end; None where it could not be queued."""

    call: Call
    ends: StreamEvent | None


class VisionBudget:
    """Keep the vision encoder to its share beside rows that decode; reads no clock.

    The seconds of a call are paid off by decode steps (`times`), each with `share` of its own
    time, before the next call.
    """

    def __init__(self, share: float, times: StepTimes) -> None:
        self._share = share
        self._times = times
        self._owed_s = 0.0
        self._owed_at = 0.0
        # Apart, not as a quotient: a call of few patches says little about the cost of one.
        self._seconds = Ewma(_NEWEST, 0.0)
        self._patches = Ewma(_NEWEST, 0.0)

    def record(self, patches: int, seconds: float) -> None:
        """Record a call of the vision encoder."""
        self._owed_s = self._owed + seconds
        self._owed_at = self._times.generation.seconds
        self._seconds.add(seconds)
        self._patches.add(patches)

    @property
    def paid(self) -> bool:
        """True if earlier calls are paid off, up to the share of one decode step."""
        return self._owed <= self._share * self._times.decode_s.value

    def patches(self, most: int) -> int:
        """Number of patches that a call may take while rows decode, `most` at the most."""
        decode_s = self._times.decode_s.value
        if not self._patches.value or not decode_s:
            return most
        return min(most, int(self._share * decode_s * self._patches.value / self._seconds.value))

    @property
    def _owed(self) -> float:
        decoded = self._times.generation.seconds - self._owed_at
        return max(0.0, self._owed_s - self._share * decoded)


@dataclass(slots=True)
class _Picture:
    work: TowerWork
    pieces: int
    spent_s: float = 0.0
    alone: bool = False


class VisionScheduler:
    """Queue calls of the vision encoder, and collect the result of each picture.

    One call is in flight at a time. One that fails over several pictures is repeated for each.
    """

    def __init__(
        self,
        runner: VisionRunner | None,
        device: Device,
        budget: VisionBudget,
        metrics: MultimodalMetrics,
    ) -> None:
        self.runner = runner
        """Vision encoder on a GPU; None on the CPU, where the encoder process has its own."""
        self._metrics = metrics
        self._device = device
        self._budget = budget
        self._pieces: deque[Piece] = deque()
        self.pictures: dict[int, _Picture] = {}
        """Pictures that are not done, by number."""
        self._in_flight = False
        self._was_last = False

    @property
    def _runner(self) -> VisionRunner:
        if self.runner is None:
            raise HearthError("internal", "there is no vision tower on this device")
        return self.runner

    def add(self, work: TowerWork) -> None:
        """Take a picture, behind all others; raises `image_too_large`, `internal` with no tower."""
        pieces = pieces_of(work.number, work.layout, self._runner.config)
        self.pictures[work.number] = _Picture(work, len(pieces))
        self._pieces.extend(pieces)

    def due(self, *, decoding: bool, joining: bool) -> bool:
        """Return True if the next step is the encoder's, which alternates with prefill chunks."""
        if not self._pieces or self._in_flight or (decoding and not self._budget.paid):
            return False
        return not (joining and self._was_last)

    def passed(self) -> None:
        """Record that a prefill chunk has its turn."""
        self._was_last = False

    def queue(self, *, decoding: bool) -> InFlightStep[TowerCall]:
        """Queue the next call; raises `device_lost`."""
        most = shared_patches(self._runner.config)
        if self.pictures[self._pieces[0].image].alone:
            most = 0
        elif decoding:
            most = self._budget.patches(most)
        call, started = take_call(self._pieces, most), time.monotonic()
        self._in_flight = self._was_last = True
        ends: StreamEvent | None = None
        error: HearthError | None = None
        try:
            self._runner.queue(call, {n: one.work.patches for n, one in self.pictures.items()})
            ends = self._device.record_event()
        except (HearthError, MemoryError) as failure:
            error = _failure(failure)
        host_s = time.monotonic() - started
        return InFlightStep("tower", [], TowerCall(call, ends), started, host_s, error=error)

    def collect(self, step: InFlightStep[TowerCall], began: float) -> list[TowerResult]:
        """Wait for a call that the device began at `began`, and return the pictures it finished.

        Raises `device_lost`.
        """
        (call, ends), self._in_flight = step.event, False
        try:
            if step.error is not None:
                raise step.error
            if ends is not None:
                ends.wait()
            seconds = time.monotonic() - began
            self._runner.collect(call, {n: one.work.out for n, one in self.pictures.items()})
        except (HearthError, MemoryError) as error:
            return self._failed(call, _failure(error))
        self._budget.record(call.patches, seconds)
        self._metrics.encode_seconds += seconds
        done = []
        for piece in call.pieces:
            picture = self.pictures[piece.image]
            picture.pieces -= 1
            picture.spent_s += seconds * piece.segment.patches / call.patches
            if not picture.pieces:
                del self.pictures[piece.image]
                self._metrics.encoded += 1
                done.append(TowerResult(piece.image, picture.spent_s))
        return done

    def drop_all(self) -> None:
        """Forget all pictures: the engine has failed."""
        self._pieces.clear()
        self.pictures.clear()
        self._in_flight = False

    def _failed(self, call: Call, error: HearthError) -> list[TowerResult]:
        numbers = list(dict.fromkeys(piece.image for piece in call.pieces))
        if len(numbers) > 1:
            for number in numbers:
                self.pictures[number].alone = True
            self._pieces.extendleft(reversed(call.pieces))
            return []
        del self.pictures[numbers[0]]
        self._pieces = deque(piece for piece in self._pieces if piece.image != numbers[0])
        return [TowerResult(numbers[0], 0.0, error)]


def _failure(error: HearthError | MemoryError) -> HearthError:
    """Turn an exception into the error of a picture; raises `device_lost` again."""
    if isinstance(error, MemoryError):
        return HearthError("out_of_memory", "no memory for a picture: send a smaller one")
    if error.code == "device_lost":
        raise error
    return error
