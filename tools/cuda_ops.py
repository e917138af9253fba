"""Times the ops around an engine on a GPU, prints JSON: `python -m tools.cuda_ops`.

Types and sizes of what they move are those of Qwen3-0.6B, with a draft of the usual vocabulary.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from msgspec import structs
from numpy.typing import DTypeLike, NDArray

from hearth.bench.random_model import SHAPE_06B
from hearth.runtime.batch import BatchReorder, RowMove
from hearth.runtime.device.cache_storage import CacheStorage
from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.device.cuda.stream import CudaEvent
from hearth.runtime.device.device import (
    BatchSampler,
    ProposalBuffers,
    SamplerBuffers,
    StepBuffers,
    TreeBuffers,
)
from hearth.runtime.options import EagleDraftingConfig
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.tensors.tensor import Tensor

CALLS, ROUNDS = 100, 9
DELAY_BYTES, DELAYS = 1 << 30, 12
HALF, FLOAT, INT32, INT64 = np.float16, np.float32, np.int32, np.int64
LAYERS, HEADS, HEAD_DIM = SHAPE_06B.layers, SHAPE_06B.kv_heads, SHAPE_06B.head_dim
VOCAB, HIDDEN = SHAPE_06B.vocabulary, SHAPE_06B.hidden
DRAFT_VOCAB = 32_000
SLOTS, CHUNK = 1024, 64
DRAFTING = EagleDraftingConfig()
NODES = DRAFTING.tree_size
# Nodes of a walk: what a good draft reaches.
DEPTH = 4
WALKS = {
    "greedy": RequestOptions(),
    "drawn": RequestOptions(temperature=0.8),
    "top_p": RequestOptions(temperature=0.8, top_p=0.9),
    "penalties": RequestOptions(repetition_penalty=1.1),
}
PICKS = {
    **WALKS,
    "top_k": RequestOptions(temperature=0.8, top_k=50),
    "top_k_top_p": RequestOptions(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
    "penalties": RequestOptions(repetition_penalty=1.1, frequency_penalty=0.1),
    "logprobs": RequestOptions(logprobs=5),
}
Figures = dict[str, float]


class Clock:
    """Microseconds of an op, in Python and on the device: medians over some rounds."""

    def __init__(self, gpu: CudaDevice) -> None:
        self.gpu = gpu
        self._first = CudaEvent(gpu.context, timing=True)
        self._last = CudaEvent(gpu.context, timing=True)
        self._delay = gpu.zeros("delay", (DELAY_BYTES,), np.dtype(np.uint8))

    def time(self, name: str, op: Callable[[], object], calls: int = CALLS) -> Figures:
        """The figures `{name}_python_us` and `{name}_gpu_us` of one call."""
        rounds = [self._round(op, calls) for _ in range(ROUNDS)]
        python, device = (float(np.median(part)) for part in zip(*rounds, strict=True))
        return {f"{name}_python_us": round(python, 2), f"{name}_gpu_us": round(device, 2)}

    def _round(self, op: Callable[[], object], calls: int) -> tuple[float, float]:
        # The device is kept busy until all calls are queued: then it runs them without a gap.
        for _ in range(DELAYS):
            self.gpu.stream.zero(self._delay.address, DELAY_BYTES)
        self._first.record(self.gpu.stream)
        begin = time.perf_counter()
        for _ in range(calls):
            op()
        python = time.perf_counter() - begin
        self._last.record(self.gpu.stream)
        self._last.wait()
        return python / calls * 1e6, self._last.elapsed_ms(self._first) / calls * 1e3


def time_steps(clock: Clock, rows: int) -> Figures:
    """The ops before and after an engine's decode step."""
    gpu = clock.gpu
    buffers = _steps(gpu, rows, CHUNK, selected=1)
    (counter,) = _zeros(gpu, INT64, counter=(rows,)).values()
    storage = _caches(gpu, rows)[1]
    fresh = tuple(
        gpu.zeros("new", (rows, HEADS, 1, HEAD_DIM), np.dtype(HALF)) for _ in range(2 * LAYERS)
    )
    chunk = np.zeros((rows, CHUNK), np.int64)
    lengths = [CHUNK] * rows
    return {
        **clock.time("feed_decode", lambda: gpu.ops.feed_decode(buffers, rows)),
        **clock.time("feed_prefill", lambda: gpu.ops.feed_prefill(buffers, chunk, lengths), 12),
        **clock.time("advance", lambda: gpu.ops.advance(counter, rows)),
        **clock.time("set_lengths", lambda: gpu.ops.set_lengths(counter, [1] * rows), 12),
        **clock.time("write", lambda: storage.write(fresh, buffers.lengths, (rows, 1, SLOTS))),
    }


def time_sampling(clock: Clock, rows: int) -> Figures:
    """One pick for all rows, by kind of setting."""
    logits = np.random.default_rng(0).standard_normal((rows, 1, VOCAB)).astype(np.float32) * 3
    sampler = _sampler(clock.gpu, logits)
    history = RowRequest(token_ids=[1, 2, 3], prompt_length=2)
    figures: Figures = {}
    for name in _begun(sampler, history, rows, PICKS):
        figures |= clock.time(f"sample_{name}", lambda: sampler.sample(rows))
    return figures


def time_compaction(clock: Clock, rows: int) -> Figures:
    """The first row leaves; bandwidths count what is read and written, in bytes a second."""
    gpu = clock.gpu
    caches, storage = _caches(gpu, rows)
    moves = [RowMove(row, row - 1, SLOTS) for row in range(1, rows)]
    size = sum(cache.nbytes // rows * (rows - 1) for cache in caches)
    source, target = _zeros(gpu, np.uint8, source=(size,), target=(size,)).values()
    driver, stream = gpu.context.driver, gpu.stream.native
    copy = (target.address, source.address, size, stream)
    figures = {
        **clock.time("compaction", lambda: storage.move(moves, (SLOTS, SLOTS)), 3),
        **clock.time("copy", lambda: driver.call("cuMemcpyDtoDAsync", *copy), 3),
    }
    compaction_us, copy_us = figures["compaction_gpu_us"], figures["copy_gpu_us"]
    return figures | {
        "compaction_bytes_s": 2 * size / compaction_us * 1e6,
        "copy_bytes_s": 2 * size / copy_us * 1e6,
        "compaction_share": round(copy_us / compaction_us, 3),
    }


def time_trees(clock: Clock, rows: int) -> Figures:
    """The ops of a proposal and of the step that verifies its tree."""
    gpu, ops = clock.gpu, clock.gpu.tree_ops
    top_k, level = DRAFTING.drafting_top_k, DRAFTING.drafting_step - 3
    proposal, trees = _proposal(gpu, rows), _trees(gpu, rows)
    logits = np.random.default_rng(0).standard_normal((rows, top_k, DRAFT_VOCAB))
    gpu.ring.upload(proposal.logits.address, (logits - 5).astype(np.float32))
    steps = _steps(gpu, rows, NODES, selected=NODES)
    steps = steps._replace(**_zeros(gpu, np.bool_, tree_mask=(rows, NODES, NODES)))
    every = np.zeros((rows, NODES), np.int32)
    draft = (rows, DRAFTING.proposal_size, top_k)
    index = np.zeros((rows, DRAFTING.most_accepted), np.int32)
    wide, kept = _zeros(
        gpu, HALF, wide=(rows, NODES, 3 * HIDDEN), kept=(rows, DRAFTING.most_accepted, 3 * HIDDEN)
    ).values()
    timed: dict[str, tuple[Callable[[], object], int]] = {
        "begin": (lambda: ops.begin_proposal(proposal, rows, top_k), CALLS),
        "feed_draft": (lambda: ops.feed_proposal(steps, proposal, steps.lengths, draft), CALLS),
        "extend": (lambda: ops.extend_proposal(proposal, rows, top_k, level, last=False), CALLS),
        "finish": (lambda: ops.finish_proposal(proposal, trees, [True] * rows, NODES), CALLS),
        "feed_verify": (lambda: ops.feed_verify(steps, trees, rows, NODES), CALLS),
        "upload_tree": (lambda: ops.upload_tree(trees, every, every - 1), 6),
        "gather": (lambda: ops.gather_rows(wide, NODES, index, kept), 12),
    }
    # Without a start every table would be empty.
    ops.begin_proposal(proposal, rows, top_k)
    figures: Figures = {}
    for name, (op, calls) in timed.items():
        figures |= clock.time(name, op, calls)
    return figures


def time_walks(clock: Clock, rows: int) -> Figures:
    """Walks of four nodes through trees of the default size, by kind of setting."""
    logits = np.random.default_rng(0).standard_normal((rows, NODES, VOCAB)).astype(np.float32)
    # A chain, and the others as children of the root with another token.
    ids = np.full((rows, NODES), VOCAB - 1, np.int32)
    parents = np.zeros((rows, NODES), np.int32)
    ids[:, :DEPTH] = np.arange(DEPTH)
    parents[:, :DEPTH] = np.arange(DEPTH) - 1
    for node in range(DEPTH):
        logits[:, node, node + 1] += np.float32(40)
    trees = _trees(clock.gpu, rows)
    clock.gpu.tree_ops.upload_tree(trees, ids, parents)
    sampler = _sampler(clock.gpu, logits, trees)
    history = RowRequest(token_ids=[VOCAB - 1] * 3, prompt_length=2)
    figures: Figures = {}
    for name in _begun(sampler, history, rows, WALKS):
        figures |= clock.time(f"verify_{name}", lambda: sampler.verify(rows, NODES), 20)
    return figures


def time_commit(clock: Clock, rows: int) -> Figures:
    """The slots of a path of four nodes, three of which move, in all layers."""
    storage = _caches(clock.gpu, rows)[1]
    nodes = np.array([[0, 3, 17, 40]] * rows, np.int32)
    return clock.time("commit", lambda: storage.commit_path(nodes, [500] * rows, SLOTS), 12)


def _zeros(gpu: CudaDevice, dtype: DTypeLike, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: gpu.zeros(name, shape, np.dtype(dtype)) for name, shape in shapes.items()}


def _caches(gpu: CudaDevice, rows: int) -> tuple[list[Tensor], CacheStorage]:
    shape = (rows, HEADS, SLOTS, HEAD_DIM)
    caches = [gpu.zeros("cache", shape, np.dtype(HALF)) for _ in range(2 * LAYERS)]
    return caches, gpu.cache_storage(caches, HEADS, HEAD_DIM)


def _steps(gpu: CudaDevice, rows: int, longest: int, selected: int) -> StepBuffers:
    return StepBuffers(
        **_zeros(gpu, HALF, embedding=(VOCAB, HIDDEN), inputs_embeds=(rows, longest, HIDDEN)),
        **_zeros(gpu, INT32, next_tokens=(rows,)),
        **_zeros(gpu, INT64, attention_pos_id=(rows, longest), last_token_ids=(rows, selected)),
        **_zeros(gpu, INT64, lengths=(rows,)),
    )


def _trees(gpu: CudaDevice, rows: int) -> TreeBuffers:
    return TreeBuffers(**_zeros(gpu, INT32, ids=(rows, NODES), parents=(rows, NODES)))


def _proposal(gpu: CudaDevice, rows: int) -> ProposalBuffers:
    top_k = DRAFTING.drafting_top_k
    slots, table = (rows, DRAFTING.proposal_size), (rows, DRAFTING.table_size)
    return ProposalBuffers(
        **_zeros(gpu, FLOAT, logits=(rows, top_k, DRAFT_VOCAB), table_scores=table),
        **_zeros(gpu, HALF, hidden_states=(rows, top_k, HIDDEN)),
        **_zeros(gpu, HALF, hidden_states_from_draft=(*slots, HIDDEN)),
        **_zeros(gpu, INT32, full_ids=(DRAFT_VOCAB,), ids=slots, parents=slots, entries=slots),
        **_zeros(gpu, INT32, table_ids=table, table_parents=table),
    )


def _sampler(
    gpu: CudaDevice, logits: NDArray[np.float32], trees: TreeBuffers | None = None
) -> BatchSampler:
    rows = (len(logits),)
    return gpu.batch_sampler(
        SamplerBuffers(
            logits=gpu.constant("logits", logits),
            **_zeros(gpu, INT64, lengths=rows),
            **_zeros(gpu, INT32, next_tokens=rows),
            trees=trees,
        )
    )


def _begun(
    sampler: BatchSampler, history: RowRequest, rows: int, settings: Mapping[str, RequestOptions]
) -> Iterator[str]:
    """The name of each setting, once the sampler has a batch of that kind."""
    for name, options in settings.items():
        row = structs.replace(history, options=structs.replace(options, max_tokens=9))
        sampler.reorder(BatchReorder.fresh([row] * rows))
        yield name


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
