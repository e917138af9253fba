import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.stream import CudaEvent, CudaStream
from hearth.runtime.errors import HearthError
from hearth.runtime.request import NO_ROW, RowToken, TopLogprob

TOP = 20
# `Result` of csrc/sampling/rows.cuh.
RESULT = np.dtype(
    [
        ("mass", np.uint64),
        ("chosen", np.float32),
        ("highest", np.float32),
        ("token", np.int32),
        ("failed", np.int32),
        ("ids", np.int32, (TOP,)),
        ("logits", np.float32, (TOP,)),
    ]
)
_UNIT = 2.0**-40


class SampleSlot:
    """Pinned results of one step, which the kernels write themselves, and the step's event."""

    def __init__(self, context: CudaContext, address: int, results: NDArray[Any]) -> None:
        self.address = address
        self.results = results
        self.tokens = self.results[["token", "failed"]]
        self.event = CudaEvent(context)
        self.uses = 0


class SampleRing:
    """Slots in turn: results stay readable until the slot's next turn, `slots` steps later."""

    def __init__(self, context: CudaContext, memory: CudaMemory, rows: int, slots: int = 4) -> None:
        results = memory.pinned_zeros("samples", (slots, rows), RESULT)
        self.address = results.address
        """Address of the first slot; the others follow."""
        self._slots = [
            SampleSlot(context, results.address + slot.nbytes * number, slot)
            for number, slot in enumerate(results.array)
        ]
        self._turn = 0

    def take(self) -> SampleSlot:
        """Take the next slot; unread results in it are lost."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        slot.uses += 1
        return slot


class CudaPendingSamples:
    """The samples of a step that may still be running.

    `wanted` gives the `logprobs` of each sampled row that asks for any.
    """

    def __init__(
        self, slot: SampleSlot, stream: CudaStream, rows: int, wanted: dict[int, int]
    ) -> None:
        slot.event.record(stream)
        self._slot = slot
        self._use = slot.uses
        self._rows, self._wanted = rows, wanted
        self._samples: list[RowToken | None] | None = None

    def result(self) -> list[RowToken | None]:
        """Wait and read, once; raises the error of the step."""
        if self._samples is None:
            self._samples = self._read()
        return self._samples

    def _read(self) -> list[RowToken | None]:
        slot = self._slot
        if slot.uses != self._use:
            raise HearthError("internal", "the samples of a step were read too late")
        slot.event.wait()
        tokens = slot.tokens[: self._rows].tolist()
        samples = [None if failed else RowToken(NO_ROW, token) for token, failed in tokens]
        for row, wanted in self._wanted.items():
            if samples[row] is not None:
                samples[row] = read_sample(slot.results[row], wanted)
        return samples


def read_sample(result: Any, wanted: int) -> RowToken:
    """A sample from one `RESULT`; with log probabilities unless `wanted` is below 0."""
    if wanted < 0:
        return RowToken(NO_ROW, int(result["token"]))
    normaliser = float(result["highest"]) + math.log(int(result["mass"]) * _UNIT)
    ids = result["ids"][:wanted].tolist()
    logits = result["logits"][:wanted].tolist()
    top = tuple(TopLogprob(i, x - normaliser) for i, x in zip(ids, logits, strict=True))
    return RowToken(NO_ROW, int(result["token"]), float(result["chosen"]) - normaliser, top)
