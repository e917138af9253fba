"""Times the ops around an engine on a GPU, prints JSON: `python -m bench.cuda_ops`."""

import json
import sys

import numpy as np
from msgspec import structs

from bench.cuda_clock import Clock, Figures
from bench.cuda_shapes import (
    HALF,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INT32,
    INT64,
    LAYERS,
    SLOTS,
    VOCAB,
)
from bench.cuda_tree_ops import time_commit, time_trees, time_walks
from runtime.device.arrays import RowMove
from runtime.device.cuda.cuda_device import open_cuda_device
from runtime.device.device import SamplerBuffers, StepBuffers
from runtime.request import RequestOptions, RowRequest


def time_steps(clock: Clock, rows: int) -> Figures:
    """The ops before and after an engine's decode step."""
    gpu = clock.gpu
    buffers = StepBuffers(
        embedding=gpu.zeros("table", (VOCAB, HIDDEN), HALF),
        next_tokens=gpu.zeros("next", (rows,), INT32),
        inputs_embeds=gpu.zeros("embeds", (rows, 64, HIDDEN), HALF),
        attention_pos_id=gpu.zeros("positions", (rows, 64), INT64),
        last_token_ids=gpu.zeros("select", (rows, 1), INT64),
        lengths=gpu.zeros("start", (rows,), INT64),
    )
    counter = gpu.zeros("counter", (rows,), INT64)
    cache_shape, new_shape = (rows, HEADS, SLOTS, HEAD_DIM), (rows, HEADS, 1, HEAD_DIM)
    caches = [gpu.zeros("cache", cache_shape, HALF) for _ in range(2 * LAYERS)]
    fresh = tuple(gpu.zeros("new", new_shape, HALF) for _ in caches)
    storage = gpu.cache_storage(caches, HEADS, HEAD_DIM)
    chunk = np.zeros((rows, 64), np.int64)
    return {
        **clock.time("feed_decode", lambda: gpu.ops.feed_decode(buffers, rows)),
        **clock.time("feed_prefill", lambda: gpu.ops.feed_prefill(buffers, chunk, [64] * rows), 12),
        **clock.time("advance", lambda: gpu.ops.advance(counter, rows)),
        **clock.time("set_lengths", lambda: gpu.ops.set_lengths(counter, [1] * rows), 12),
        **clock.time("write", lambda: storage.write(fresh, buffers.lengths, (rows, 1, SLOTS))),
    }


SETTINGS = {
    "greedy": RequestOptions(),
    "drawn": RequestOptions(temperature=0.8),
    "top_p": RequestOptions(temperature=0.8, top_p=0.9),
    "top_k_top_p": RequestOptions(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
    "penalties": RequestOptions(repetition_penalty=1.1, frequency_penalty=0.1),
    "logprobs": RequestOptions(logprobs=5),
}


def time_sampling(clock: Clock, rows: int) -> Figures:
    """One pick for all rows, by kind of setting."""
    gpu = clock.gpu
    logits = np.random.default_rng(0).standard_normal((rows, 1, VOCAB)).astype(np.float32) * 3
    buffers = SamplerBuffers(
        logits=gpu.constant("logits", logits),
        lengths=gpu.zeros("start", (rows,), INT64),
        next_tokens=gpu.zeros("next", (rows,), INT32),
    )
    sampler = gpu.batch_sampler(buffers)
    figures: Figures = {}
    for name, params in SETTINGS.items():
        row = RowRequest(
            token_ids=[1, 2, 3], prompt_length=2, options=structs.replace(params, max_tokens=9)
        )
        sampler.begin([row] * rows)
        figures |= clock.time(f"sample_{name}", lambda: sampler.sample(rows))
    return figures


def time_compaction(clock: Clock, rows: int) -> Figures:
    """The first row leaves; bandwidths count what is read and written, in bytes a second."""
    gpu = clock.gpu
    shape = (rows, HEADS, SLOTS, HEAD_DIM)
    caches = [gpu.zeros("cache", shape, HALF) for _ in range(2 * LAYERS)]
    storage = gpu.cache_storage(caches, HEADS, HEAD_DIM)
    moves = [RowMove(row, row - 1, SLOTS) for row in range(1, rows)]
    moved = 2 * sum(cache.nbytes // rows * (rows - 1) for cache in caches)
    figures = clock.time("compaction", lambda: storage.move(moves, (SLOTS, SLOTS)), 3)
    size = moved // 2
    source, target = (gpu.zeros("copy", (size,), np.dtype(np.uint8)) for _ in range(2))
    driver, stream = gpu.context.driver, gpu.stream.native
    figures |= clock.time(
        "copy",
        lambda: driver.call("cuMemcpyDtoDAsync", target.address, source.address, size, stream),
        3,
    )
    share = figures["copy_gpu_us"] / figures["compaction_gpu_us"]
    bandwidth = {
        "compaction_bytes_s": moved / figures["compaction_gpu_us"] * 1e6,
        "copy_bytes_s": moved / figures["copy_gpu_us"] * 1e6,
        "compaction_share": round(share, 3),
    }
    return figures | bandwidth


def main() -> None:
    """Measure batches of 1 and 8, compactions of 8 and 32 rows, and print all figures."""
    gpu = open_cuda_device()
    clock = Clock(gpu)
    figures: dict[str, Figures] = {}
    for rows in (1, 8):
        figures[f"b{rows}"] = time_steps(clock, rows) | time_sampling(clock, rows)
        trees = time_trees(clock, rows) | time_walks(clock, rows) | time_commit(clock, rows)
        figures[f"trees/b{rows}"] = trees
    for rows in (8, 32):
        figures[f"compaction/b{rows}"] = time_compaction(clock, rows)
    report = {"device": gpu.properties.name, "figures": figures}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    gpu.close()


if __name__ == "__main__":
    main()
