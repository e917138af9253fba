import numpy as np
from numpy.typing import NDArray

from runtime.device.cpu.cpu_device import CpuDevice
from runtime.device.device import BatchSampler, SamplerBuffers
from runtime.request import RowRequest, SamplingParams
from runtime.sampling import RowSampler, Sample, sample_rows
from runtime.tensors.tensor import Tensor

VOCAB = 40
PROMPTS = ([3, 4, 5, 5], [9, 9], [1])
SAMPLING = (
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(temperature=1.5, seed=8, frequency_penalty=0.9),
    SamplingParams(temperature=0.7, top_k=5, seed=1, logprobs=2),
)


def _requests() -> list[RowRequest]:
    return [
        RowRequest(token_ids=prompt, prompt_length=len(prompt), max_tokens=9, sampling=sampling)
        for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
    ]


def _started() -> tuple[BatchSampler, SamplerBuffers]:
    buffers = SamplerBuffers(
        logits=Tensor.zeros("logits", (3, 1, VOCAB), np.dtype(np.float32)),
        start=Tensor("start", np.array([len(prompt) for prompt in PROMPTS])),
        next_tokens=Tensor.zeros("next_tokens", (3,), np.dtype(np.int32)),
    )
    sampler = CpuDevice().batch_sampler(buffers)
    sampler.begin(_requests())
    return sampler, buffers


def _logits(step: int, rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(step).normal(size=(rows, VOCAB)).astype(np.float32) * 3


def _reference() -> list[RowSampler]:
    return [
        RowSampler(row.sampling, row.token_ids, row.prompt_length, VOCAB) for row in _requests()
    ]


def test_rows_pick_what_they_pick_alone_over_a_growing_history_and_an_eviction() -> None:
    sampler, buffers = _started()
    alone = _reference()
    for step in range(8):
        if step == 4:
            sampler.compact([0, -1, 1])
            del alone[1]
            buffers.start.array[:2] = buffers.start.array[[0, 2]]
        rows = len(alone)
        logits = buffers.logits.view((rows, VOCAB))
        logits[:] = _logits(step, rows)
        want = sample_rows(logits, alone, buffers.start.array[:rows].tolist())
        assert sampler.sample(rows).result() == want
        for one, sample in zip(alone, want, strict=True):
            assert sample is not None
            one.accept(sample.token_id)
        assert buffers.next_tokens.array[:rows].tolist() == [one.token_id for one in want if one]
        buffers.start.array[:] += 1


def test_newest_tokens_move_with_their_rows() -> None:
    sampler, buffers = _started()
    buffers.next_tokens.array[:] = [7, 8, 9]
    sampler.compact([-1, 0, 1])
    assert buffers.next_tokens.array[:2].tolist() == [8, 9]


def test_rows_with_prompt_left_are_only_checked() -> None:
    sampler, buffers = _started()
    logits = buffers.logits.view((3, VOCAB))
    logits[:] = _logits(0, 3)
    logits[1, 7] = np.inf
    buffers.next_tokens.array[:] = 5
    first, second, third = sampler.sample(3, waiting=2).result()
    assert (first, second) == (Sample(-1), None)
    assert third is not None
    assert buffers.next_tokens.array.tolist() == [5, 5, third.token_id]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    sampler, buffers = _started()
    logits = buffers.logits.view((3, VOCAB))
    logits[:] = _logits(0, 3)
    logits[1, 7] = np.nan
    samples = sampler.sample(3).result()
    assert [sample is None for sample in samples] == [False, True, False]
    assert buffers.next_tokens.array[1] == -1
