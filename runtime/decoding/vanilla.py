import time
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.decoding.prefill_budget import Chunk
from runtime.device.device import BatchSampler
from runtime.device.picks import PendingSamples
from runtime.request import RowRound, RowToken
from runtime.rows import DecodingInferenceContext, DecodingRow
from runtime.steps.engine_runner import LLMEngineRunner
from runtime.steps.image_merge import ImagePiece, image_pieces
from runtime.tensors.profiles import prefill_width


class PendingStep(msgspec.Struct, frozen=True):
    """A step that was queued: its rows, by place from `first` on, and the tokens to come.

    `lengths` are the tokens that it puts into the caches of each row, `computed` those that the
    engine runs, with padding. `started` is in seconds of the monotonic clock, and `host_s` what
    the host took from there to queue it.
    """

    kind: Literal["prefill", "decode"]
    rows: list[DecodingRow]
    samples: PendingSamples
    started: float
    lengths: list[int]
    computed: int
    host_s: float
    first: int = 0

    @property
    def filled(self) -> int:
        """Tokens that it puts into the caches."""
        return sum(self.lengths)

    @property
    def width(self) -> int:
        """Tokens that it computes for each row."""
        return self.computed // len(self.rows)

    @property
    def padding(self) -> int:
        """Tokens that it computes behind those of the row with the fewest."""
        return self.width - min(self.lengths)

    @property
    def rounds(self) -> list[RowRound]:
        """None: these are no rounds of speculation."""
        return []

    def collect(self) -> list[RowToken]:
        """Wait for the tokens and hand them to their rows; rows that left report nothing."""
        samples = self.samples.result()
        return [
            report
            for row, sample in zip(self.rows, samples, strict=True)
            if (report := row.take(sample)) is not None
        ]


class VanillaStrategy:
    """One token a row and step, from the base engine alone."""

    def __init__(self, runner: LLMEngineRunner, sampler: BatchSampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._config = runner.get_engine_config()
        # Where other engines are captured, nothing is captured with them.
        self._picks = sampler.recording if self._config.backend == "kernels" else None

    def prefill_step(self, context: DecodingInferenceContext, chunk: Chunk) -> PendingStep:
        """Queue a chunk of the first joiners; rows whose prompt ends in it get their first token.

        Those are the first of them, as joiners come with the shortest rest first.
        """
        started = time.monotonic()
        rows, first = context.joiners[: chunk.rows], context.decoding
        room = self._config.max_kv_cache_capacity - max(row.filled for row in rows)
        width = prefill_width(self._config, chunk.width, room)
        token_ids, lengths = _pieces(rows, chunk.width, width)
        images: list[ImagePiece] = []
        if self._config.image_token_id:
            filled = [row.filled for row in rows]
            images = image_pieces([row.request.images for row in rows], filled, lengths, width)
        self._runner.execute_prefill_step(token_ids, lengths, first, images)
        picked = context.prefilled(lengths)
        samples = self._sampler.sample(len(rows), first, picked)
        host_s = time.monotonic() - started
        return PendingStep(
            "prefill", rows, samples, started, lengths, token_ids.size, host_s, first
        )

    def decode_step(self, context: DecodingInferenceContext) -> PendingStep:
        """Queue a step that runs the newest token of every decoding row and picks the next."""
        started = time.monotonic()
        rows, picks = context.decoders, self._picks
        count = len(rows)
        if picks is not None:
            picks.expect(count)
        if picks is not None and self._runner.launch_vanilla_decoding_step(count):
            samples = picks.samples()
        else:
            self._runner.execute_vanilla_decoding_step(count)
            samples = self._sampler.sample(count)
        context.decoded()
        host_s = time.monotonic() - started
        return PendingStep("decode", rows, samples, started, [1] * count, count, host_s)

    def capture(self, batch_sizes: Sequence[int]) -> None:
        """Capture the decode step of each of these batch sizes, between batches."""
        if self._picks is not None:
            # A capture runs the step.
            self._picks.expect(0)
        self._runner.capture_vanilla_decoding_graph(batch_sizes, self._picks)


def _pieces(
    rows: Sequence[DecodingRow], longest: int, width: int
) -> tuple[NDArray[np.int64], list[int]]:
    """The next piece of each prompt, `longest` tokens at most, and its length.

    Pieces are padded at the right with token 0 to `width`.
    """
    lengths = [min(longest, row.prompt_left) for row in rows]
    token_ids = np.zeros((len(rows), width), np.int64)
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        token_ids[place, :length] = row.initial[row.filled : row.filled + length]
    return token_ids, lengths
