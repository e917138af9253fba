from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hearth.runtime.batch import DecodingInferenceContext, RowState
from hearth.runtime.device.cpu import ops as cpu_sampler
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import SamplerBuffers
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation.prefill_budget import Chunk
from hearth.runtime.generation.vanilla import VanillaStrategy
from hearth.runtime.request import RequestOptions, RowRequest, RowToken
from hearth.runtime.runner.engine_runner import LLMEngineRunner
from hearth.runtime.runner.image_merge import ImagePiece
from hearth.runtime.runner.pipeline_io import PipelineIO
from hearth.runtime.runner.shared_resources import SharedResources
from hearth.runtime.sampling import RowSampler, Sample, sample_rows
from hearth.runtime.tensors.tensor import Tensor

CONFIG = simulated_config(vocab_size=50, layers=1, max_batch=3, prefill_chunk=4)


class _Steps(LLMEngineRunner):
    """Notes what each step is given; logits of `bad_rows` are not finite."""

    def __init__(self) -> None:
        device = CpuDevice()
        self.resources = SharedResources.create_for_llm(CONFIG, Path(), device)
        self.io = PipelineIO.create_for_llm(CONFIG, self.resources, device)
        super().__init__(
            CONFIG,
            EngineExecutor.create_for_llm(Path(), CONFIG, EngineOptions(), device),
            self.io,
            self.resources,
            device,
        )
        self.sampler = device.batch_sampler(
            SamplerBuffers(
                self.io.step.logits, self.get_kv_cache().lengths, self.io.step.inputs.next_tokens
            )
        )
        self.chunks: list[list[list[int]]] = []
        self.bad_rows: list[int] = []

    def execute_prefill_step(
        self,
        token_ids: np.ndarray,
        lengths: Sequence[int],
        first: int = 0,
        images: Sequence[ImagePiece] = (),
    ) -> Tensor:
        rows = zip(token_ids.tolist(), lengths, strict=True)
        self.chunks.append([row[:length] for row, length in rows])
        return self._spoil(super().execute_prefill_step(token_ids, lengths, first, images))

    def execute_vanilla_decoding_step(self, rows: int) -> Tensor:
        self.chunks.append([self.io.step.inputs.next_tokens.array[:rows].tolist()])
        return self._spoil(super().execute_vanilla_decoding_step(rows))

    def _spoil(self, logits: Tensor) -> Tensor:
        for row in self.bad_rows:
            logits.view((row + 1, CONFIG.vocab_size))[row, 3] = np.nan
        return logits


def _started(*lengths: int) -> tuple[_Steps, VanillaStrategy, DecodingInferenceContext]:
    runner = _Steps()
    requests = [
        RowRequest(
            token_ids=list(range(1, length + 1)),
            prompt_length=length,
            options=RequestOptions(max_tokens=9),
        )
        for length in lengths
    ]
    context = DecodingInferenceContext(CONFIG)
    context.admit(requests)
    reorder = context.arrange()
    assert reorder is not None
    runner.get_kv_cache().reorder(reorder)
    runner.sampler.reorder(reorder)
    return runner, VanillaStrategy(runner, runner.sampler), context


def _prefill(strategy: VanillaStrategy, context: DecodingInferenceContext) -> list[RowToken]:
    """What a chunk of all joiners gives."""
    rows = context.joiners
    chunk = Chunk(len(rows), min(4, rows[-1].prompt_left))
    return strategy.collect(strategy.prefill_step(context, chunk))


def _decode(strategy: VanillaStrategy, context: DecodingInferenceContext) -> list[RowToken]:
    return strategy.collect(strategy.decode_step(context))


def test_prompts_are_taken_chunk_by_chunk_and_sampled_where_they_end() -> None:
    runner, strategy, context = _started(2, 9, 4)
    reported = []
    while context.joiners:
        reported.append([token.row for token in _prefill(strategy, context)])
    assert runner.chunks == [[[1, 2], [1, 2, 3, 4], [1, 2, 3, 4]], [[5, 6, 7, 8]], [[9]]]
    assert reported == [[0, 2], [], [1]]
    assert [row.filled for row in context.rows] == [2, 4, 9]
    assert runner.get_kv_cache().row_lengths == [2, 4, 9]


def test_a_chunk_of_some_joiners_leaves_the_others_alone() -> None:
    runner, strategy, context = _started(2, 9, 9)
    step = strategy.prefill_step(context, Chunk(1, 2))
    assert (step.lengths, step.computed, step.first) == ([2], 2, 0)
    step = strategy.prefill_step(context, Chunk(1, 3))
    assert (step.lengths, step.computed, step.first) == ([3], 3, 1)
    assert runner.chunks == [[[1, 2]], [[1, 2, 3]]]
    assert runner.get_kv_cache().row_lengths == [2, 3, 0]


def test_a_decode_feeds_the_newest_tokens() -> None:
    runner, strategy, context = _started(2, 3)
    first = _prefill(strategy, context)
    second = _decode(strategy, context)
    assert runner.chunks[1] == [[token.token_id for token in first]]
    assert [token.row for token in second] == [0, 1]
    assert [row.generated for row in context.rows] == [
        [one.token_id, two.token_id] for one, two in zip(first, second, strict=True)
    ]


def test_a_token_is_sampled_for_its_own_position(monkeypatch: pytest.MonkeyPatch) -> None:
    positions: list[list[int]] = []

    def note(
        logits: np.ndarray, samplers: Sequence[RowSampler], asked: Sequence[int]
    ) -> list[Sample | None]:
        positions.append(list(asked))
        return sample_rows(logits, samplers, asked)

    monkeypatch.setattr(cpu_sampler, "sample_rows", note)
    _, strategy, context = _started(2, 3)
    _prefill(strategy, context)
    _decode(strategy, context)
    assert positions == [[2, 3], [3, 4]]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_row_fails_alone(bad: int) -> None:
    runner, strategy, context = _started(3, 3)
    _prefill(strategy, context)
    runner.bad_rows = [bad]
    errors = [token.error for token in _decode(strategy, context)]
    assert errors == ["non_finite" if row == bad else None for row in range(2)]
    assert [row.state is RowState.FAILED for row in context.rows] == [bad == 0, bad == 1]


def test_a_row_may_fail_in_the_middle_of_its_prompt() -> None:
    runner, strategy, context = _started(9, 6)
    runner.bad_rows = [0]
    reports = _prefill(strategy, context)
    assert [(token.row, token.token_id, token.error) for token in reports] == [
        (1, -1, "non_finite")
    ]
    assert context.rows[1].state is RowState.LIVE
