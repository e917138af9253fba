import ctypes

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.cuda.launch import KernelLaunch, addresses, integers
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.request import RequestOptions

# `Row` of csrc/sampling/rows.cuh and the flags of its tables.
ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("top_k", np.int32),
        ("logprobs", np.int32),
        ("flags", np.uint32),
    ]
)
HISTORY, BIAS, MASK = 1, 2, 4
_SMALLEST = float(np.finfo(np.float32).tiny)

SettingsRow = tuple[int, float, float, float, float, float, float, int, int, int]


def row_settings(params: RequestOptions, vocab_size: int) -> SettingsRow:
    """A row's settings as a value of `ROW`; filters that keep every token are off."""
    penalised = (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )
    # As in `hearth.runtime.sampling.row_sampler.tempered`: above 0, but too small for a float32.
    temperature = max(params.temperature, _SMALLEST) if params.temperature else 0.0
    return (
        params.seed or 0,
        params.top_p,
        temperature,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.top_k if params.top_k < vocab_size else 0,
        -1 if params.logprobs is None else params.logprobs,
        (HISTORY if penalised else 0)
        | (BIAS if params.logit_bias else 0)
        | (MASK if params.grammar else 0),
    )


def row_biases(params: RequestOptions) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Biased tokens and their biases."""
    ids = np.array([token_id for token_id, _ in params.logit_bias], np.int32)
    return ids, np.array([bias for _, bias in params.logit_bias], np.float32)


def is_greedy(settings: SettingsRow) -> bool:
    """Return True if the row needs no more than an argmax over its raw logits."""
    return settings[2] == 0 and settings[8] < 0 and not settings[-1]


THREADS = 512
UNIT = 128
"""Ids that a warp takes at a time."""
SPOTS = 64
"""Spots (rows or nodes) that one launch serves."""
# Blocks that fit a multiprocessor, and tokens that a block can count.
_RESIDENT, _MOST_COUNTED = 2, 1 << 18
_BINS = _LISTED = 2048
# `Work` of csrc/sampling/wide.cuh.
_WORK = np.dtype(
    [
        ("counts", np.uint32, (_BINS,)),
        ("masses", np.uint64, (_BINS,)),
        ("list", np.uint64, (_LISTED,)),
        ("mass", np.uint64),
        ("edge", np.uint64, (5,)),
        ("listed", np.uint32),
        ("done", np.uint32),
    ]
)
WORK_BYTES = 2 * SPOTS * _WORK.itemsize
"""Device memory that `WideDraws` takes beside 8 bytes for each spot and unit."""


class WideArguments(ctypes.Structure):
    """`Wide` of csrc/sampling/wide.cuh."""

    _fields_ = (*addresses("works ranges"), *integers("first unused"))


class Stages:
    """Launches that rows with these settings need beside the one that finds the highest score."""

    def __init__(self, rows: list[SettingsRow]) -> None:
        self._stages = [_stage(row) for row in rows]
        self._reports = [row[8] >= 0 for row in rows]

    def of(self, first: int, end: int) -> tuple[int, int]:
        """Return how many of `weigh` and `pick` rows `first` to `end` need, and their jobs."""
        return max(self._stages[first:end], default=0), 1 + any(self._reports[first:end])


def _stage(row: SettingsRow) -> int:
    _, top_p, temperature, *_, top_k, logprobs, _ = row
    if logprobs > 0 or (temperature > 0 and (top_k or top_p < 1)):
        return 2
    return int(temperature > 0 or logprobs >= 0)


class WideDraws:
    """Launches of draws and log probabilities over the whole GPU.

    Sums are of integers, and the weights of a unit are summed by themselves, so tokens do not
    depend on the number of blocks.
    """

    def __init__(self, memory: CudaMemory, vocab_size: int, multiprocessors: int) -> None:
        units = -(-vocab_size // UNIT)
        self._most = -(-units * 32 // THREADS)
        self._least = -(-vocab_size // _MOST_COUNTED)
        self._room = _RESIDENT * multiprocessors
        works = memory.zeros("draws", (SPOTS, 2), _WORK)
        ranges = memory.zeros("weights of units", (SPOTS, units), np.dtype(np.uint64))
        self.arguments = WideArguments(works.address, ranges.address)

    def blocks(self, spots: int) -> int:
        """Number of blocks of each spot; a warp takes several units if not all blocks fit."""
        turns = -(-self._most * spots // self._room)
        return max(self._least, -(-self._most // turns))

    def launch(self, launches: tuple[KernelLaunch, ...], spots: int, jobs: int) -> None:
        """Queue the `launches` for each of the spots; `jobs` is 2 with log probabilities."""
        for first in range(0, spots, SPOTS):
            self.arguments.first = first
            count = min(SPOTS, spots - first)
            blocks = self.blocks(count * jobs)
            for each in launches:
                each.launch(blocks, count, jobs)
