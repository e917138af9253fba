import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.batch import DecodingInferenceContext, DecodingRow
from hearth.runtime.device.device import BatchSampler, PendingSamples
from hearth.runtime.generation.in_flight import InFlightStep
from hearth.runtime.generation.prefill_budget import Chunk
from hearth.runtime.request import RowToken
from hearth.runtime.runner.engine_runner import LLMEngineRunner
from hearth.runtime.runner.image_merge import ImagePiece, image_pieces
from hearth.runtime.tensors.profiles import prefill_width


class VanillaStrategy:
    """One token a row and step, from the base engine alone."""

    def __init__(self, runner: LLMEngineRunner, sampler: BatchSampler) -> None:
        self.sampler = sampler
        self._runner = runner
        self._config = runner.get_engine_config()
        # Where other engines are captured, nothing is captured with them.
        self._captured = sampler.captured_sampler if self._config.backend == "kernels" else None

    def prefill_step(
        self, context: DecodingInferenceContext, chunk: Chunk
    ) -> InFlightStep[PendingSamples]:
        """Queue a chunk of the first prefilling rows; those whose prompt ends in it get a token.

        They are the first ones, as prefilling rows come with the shortest rest first.
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
        masks = [row.mask() for row in rows[:picked]] if context.masked else ()
        samples = self.sampler.sample(len(rows), first, picked, masks)
        host_s = time.monotonic() - started
        return InFlightStep(
            "prefill", rows, samples, started, host_s, lengths, token_ids.size, first
        )

    def decode_step(
        self, context: DecodingInferenceContext, *, known: bool = True
    ) -> InFlightStep[PendingSamples]:
        """Queue a step that runs the newest token of every decoding row and samples the next.

        Where a row has a grammar, and not all tokens before are `known`, the step is `unpicked`.
        """
        started = time.monotonic()
        rows, captured = context.decoders, self._captured
        count = len(rows)
        if context.masked and any(row.matcher is not None for row in rows):
            self._runner.execute_vanilla_decoding_step(count, alone=True)
            context.decoded()
            host_s = time.monotonic() - started
            step: InFlightStep[Any] = InFlightStep("decode", rows, None, started, host_s)
            step.lengths, step.computed, step.unpicked = [1] * count, count, True
            if known:
                self.pick(step)
            return step
        if captured is not None:
            captured.expect(count)
        if captured is not None and self._runner.launch_vanilla_decoding_step(count):
            samples = captured.samples()
        else:
            self._runner.execute_vanilla_decoding_step(count)
            samples = self.sampler.sample(count)
        context.decoded()
        host_s = time.monotonic() - started
        return InFlightStep("decode", rows, samples, started, host_s, [1] * count, count)

    def pick(self, step: InFlightStep[PendingSamples]) -> None:
        """Queue the sampling of a step that is `unpicked`; its rows' tokens before are known."""
        rows = step.rows
        step.event = self.sampler.sample(len(rows), masks=[row.mask() for row in rows])
        step.unpicked = False

    def collect(self, step: InFlightStep[PendingSamples]) -> list[RowToken]:
        """Wait for the tokens and hand them to their rows; rows that left report nothing."""
        samples = step.event.result()
        return [
            report
            for row, sample in zip(step.rows, samples, strict=True)
            if (report := row.take(sample)) is not None
        ]

    def capture(self, batch_sizes: Sequence[int]) -> None:
        """Capture the decode step of each of these batch sizes, between batches."""
        if self._captured is not None:
            # A capture runs the step.
            self._captured.expect(0)
        self._runner.capture_vanilla_decoding_graph(batch_sizes, self._captured)


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
