"""Runs every op once on small sizes, for `compute-sanitizer --tool memcheck python3 -m ...`."""

import sys

import numpy as np

from runtime.device.arrays import RowMove
from runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from runtime.device.device import SamplerBuffers, StepBuffers
from runtime.request import RowRequest, SamplingParams
from runtime.sampling.allowed import pack_allowed

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
ROWS, VOCAB, HIDDEN = 5, 3001, 96


def run_steps(gpu: CudaDevice, index: "np.dtype[np.signedinteger]", out: "np.dtype") -> None:
    buffers = StepBuffers(
        table=gpu.constant("table", np.ones((VOCAB, HIDDEN), np.float16)),
        next_tokens=gpu.constant("next", np.array([-1, 3, VOCAB - 1, 0, 5], np.int32)),
        embeds=gpu.zeros("embeds", (ROWS, 9, HIDDEN), out),
        positions=gpu.zeros("positions", (ROWS, 9), index),
        select=gpu.zeros("select", (ROWS, 1), index),
        start=gpu.zeros("start", (ROWS,), index),
    )
    gpu.ops.set_lengths(buffers.start, [3] * ROWS)
    gpu.ops.feed_prefill(buffers, np.full((ROWS, 9), VOCAB - 1), [9, 8, 3, 2, 1])
    gpu.ops.feed_decode(buffers, ROWS)
    gpu.ops.advance(buffers.start, ROWS)
    caches = [gpu.zeros("cache", (ROWS, 2, 21, 33), HALF) for _ in range(6)]
    storage = gpu.cache_storage(caches, 2, 33)
    for steps in (1, 9):
        fresh = [gpu.zeros("new", (ROWS, 2, steps, 33), HALF) for _ in caches]
        storage.write(fresh, buffers.start, (ROWS, steps, 21))
    storage.move([RowMove(1, 0, 21), RowMove(2, 1, 4), RowMove(4, 2, 20)], (21, 21))
    storage.zero_row(4, 21)
    storage.write_row(3, storage.read_row(2, 20, 21), 21)


def run_sampler(gpu: CudaDevice, index: "np.dtype[np.signedinteger]") -> None:
    logits = np.random.default_rng(0).standard_normal((ROWS, 1, VOCAB)).astype(np.float32)
    logits[4] = 1.5
    buffers = SamplerBuffers(
        logits=gpu.constant("logits", logits),
        start=gpu.zeros("start", (ROWS,), index),
        next_tokens=gpu.zeros("next", (ROWS,), INT32),
    )
    sampler = gpu.batch_sampler(buffers)
    settings = [
        SamplingParams(logprobs=20),
        SamplingParams(temperature=1, top_k=40, top_p=0.9, min_p=0.01, seed=7),
        SamplingParams(temperature=2, repetition_penalty=1.3, logit_bias={VOCAB - 1: 2.0}),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.1),
        SamplingParams(temperature=1, top_k=2500, top_p=0.99, logprobs=3),
    ]
    sampler.begin(
        [
            RowRequest(token_ids=[1, VOCAB - 1, 1], prompt_length=1, max_tokens=9, sampling=params)
            for params in settings
        ]
    )
    sampler.allow(1, pack_allowed(range(0, VOCAB, 3), VOCAB))
    sampler.sample(ROWS, 2).result()
    sampler.sample(ROWS).result()
    sampler.compact([-1, 0, 1, 2, 3])
    samples = sampler.sample(ROWS - 1).result()
    sys.stdout.write(f"{[sample.token_id for sample in samples if sample]}\n")


def main() -> None:
    gpu = open_cuda_device()
    for index in (INT32, INT64):
        for out in (HALF, FLOAT):
            run_steps(gpu, index, out)
        run_sampler(gpu, index)
    gpu.close()


if __name__ == "__main__":
    main()
