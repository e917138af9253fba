"""Runs every op once on small sizes, for `compute-sanitizer --tool memcheck python3 -m ...`."""

import sys

import numpy as np
from msgspec import structs

from hearth.runtime.batch import BatchReorder, RowMove
from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.device.device import ProposalBuffers, SamplerBuffers, StepBuffers, TreeBuffers
from hearth.runtime.request import RequestOptions, RowRequest
from tests.runtime.arrangements import keep
from tests.runtime.device import image_buffers
from tests.runtime.device.cuda import tree_buffers
from tests.runtime.device.cuda.tree_buffers import Shape, on_gpu

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
ROWS, VOCAB, HIDDEN = 5, 3001, 96


def run_steps(gpu: CudaDevice, index: "np.dtype[np.signedinteger]", out: "np.dtype") -> None:
    buffers = StepBuffers(
        embedding=gpu.constant("table", np.ones((VOCAB, HIDDEN), np.float16)),
        next_tokens=gpu.constant("next", np.array([-1, 3, VOCAB - 1, 0, 5], np.int32)),
        inputs_embeds=gpu.zeros("embeds", (ROWS, 9, HIDDEN), out),
        attention_pos_id=gpu.zeros("positions", (ROWS, 9), index),
        last_token_ids=gpu.zeros("select", (ROWS, 1), index),
        lengths=gpu.zeros("start", (ROWS,), index),
        tree_mask=gpu.zeros("mask", (ROWS, 9, 9), np.dtype(np.bool_)),
        packed_mask=gpu.zeros("packed", (ROWS, 9, 1), INT32),
    )
    gpu.ops.set_lengths(buffers.lengths, [3] * ROWS)
    gpu.ops.feed_prefill(buffers, np.full((ROWS, 9), VOCAB - 1), [9, 8, 3, 2, 1])
    gpu.ops.feed_prefill(buffers, np.zeros((ROWS, 9), np.int64), [9, 8, 3, 2, 1], [4] * ROWS)
    hidden = [gpu.zeros("hidden", (ROWS, 9, 33), HALF) for _ in range(2)]
    places = np.tile(np.arange(-1, 8, dtype=np.int32), (ROWS, 1))
    given = ([[0] * 9] * ROWS, [9] * ROWS, [4] * ROWS, places.tolist())
    gpu.ops.put_entries(buffers, *given, filled=[3] * ROWS)
    grown = gpu.zeros("grown", (ROWS,), index)
    gpu.ops.feed_entries(buffers, hidden[0], hidden[1], grown, (ROWS, 9))
    gpu.ops.feed_decode(buffers, ROWS)
    gpu.ops.advance(buffers.lengths, ROWS)
    caches = [gpu.zeros("cache", (ROWS, 2, 21, 33), HALF) for _ in range(6)]
    storage = gpu.cache_storage(caches, 2, 33)
    for steps in (1, 9):
        fresh = [gpu.zeros("new", (ROWS, 2, steps, 33), HALF) for _ in caches]
        storage.write(fresh, buffers.lengths, (ROWS, steps, 21))
    storage.write(fresh, buffers.lengths, (2, 9, 21), 3)
    storage.move([RowMove(1, 0, 21), RowMove(3, 4, 4), RowMove(2, 3, 20)], (21, 21))
    storage.commit_path(np.array([[0, 2, 5, 8], [0, 8, -1, -1]], np.int32), [12, 12], 21)
    storage.zero(4, 3, 21, 21)
    storage.write_row(3, storage.read_row(2, 20, 21), 21)


def run_sampler(gpu: CudaDevice, index: "np.dtype[np.signedinteger]") -> None:
    logits = np.random.default_rng(0).standard_normal((ROWS, 1, VOCAB)).astype(np.float32)
    logits[4] = 1.5
    buffers = SamplerBuffers(
        logits=gpu.constant("logits", logits),
        lengths=gpu.zeros("start", (ROWS,), index),
        next_tokens=gpu.zeros("next", (ROWS,), INT32),
    )
    sampler = gpu.batch_sampler(buffers)
    settings = [
        RequestOptions(logprobs=20),
        RequestOptions(temperature=1, top_k=40, top_p=0.9, min_p=0.01, seed=7),
        RequestOptions(temperature=2, repetition_penalty=1.3, logit_bias=((VOCAB - 1, 2.0),)),
        RequestOptions(frequency_penalty=0.5, presence_penalty=0.1),
        RequestOptions(temperature=1, top_k=2500, top_p=0.99, logprobs=3),
    ]
    sampler.reorder(
        BatchReorder.fresh(
            [
                RowRequest(
                    token_ids=[1, VOCAB - 1, 1],
                    prompt_length=1,
                    options=structs.replace(params, max_tokens=9),
                )
                for params in settings
            ]
        )
    )
    sampler.sample(ROWS, picked=2).result()
    sampler.sample(3, 2, 1).result()
    sampler.sample(ROWS).result()
    sampler.reorder(keep(1, 2, 3, 4))
    samples = sampler.sample(ROWS - 1).result()
    sys.stdout.write(f"{[sample.token_id for sample in samples if sample]}\n")


def run_trees(gpu: CudaDevice, index: "np.dtype[np.signedinteger]", shape: Shape) -> None:
    rng = np.random.default_rng(shape.vocab)
    rows, top_k, levels, vocab = shape
    width = min(33, shape.entries)
    longest = max(width, shape.slots)
    steps = StepBuffers(*on_gpu(gpu, tree_buffers.step_buffers(longest, index, packed=True)))
    trees = TreeBuffers(*on_gpu(gpu, tree_buffers.tree_buffers(width)))
    proposal = ProposalBuffers(
        *on_gpu(gpu, tree_buffers.proposal_buffers(shape, HALF, mapped=True))
    )
    logits = tree_buffers.random_logits(rng, "odd", (rows, top_k, vocab))
    gpu.ring.upload(proposal.logits.address, logits)
    ops = gpu.tree_ops
    ops.begin_proposal(proposal, rows, top_k)
    for level in range(levels - 1):
        ops.feed_proposal(steps, proposal, steps.lengths, (rows, (level + 1) * top_k, top_k))
        ops.extend_proposal(proposal, rows, top_k, level, last=level == levels - 2)
    ops.finish_proposal(proposal, trees, [row != 1 for row in range(rows)], width)
    ops.feed_verify(steps, trees, rows, width)
    ops.gather_rows(
        steps.inputs_embeds,
        2,
        np.array([[1, -1, 0]] * rows, np.int32),
        proposal.hidden_states_from_draft,
    )
    ops.gather_rows(steps.inputs_embeds, 1, np.full((1, rows), -1, np.int32), steps.inputs_embeds)
    run_walks(gpu, trees, steps, rows, width)


def run_walks(
    gpu: CudaDevice, trees: TreeBuffers, steps: StepBuffers, rows: int, width: int
) -> None:
    rng = np.random.default_rng(width)
    logits = rng.standard_normal((8, width, 60)).astype(np.float32)
    buffers = SamplerBuffers(
        gpu.constant("logits", logits), steps.lengths, steps.next_tokens, trees
    )
    sampler = gpu.batch_sampler(buffers)
    params = [
        RequestOptions(),
        RequestOptions(temperature=1, top_p=0.9, frequency_penalty=0.3, logprobs=2),
        RequestOptions(temperature=2, top_k=9),
    ]
    for kinds in (params, params[:1]):
        settings = [kinds[row % len(kinds)] for row in range(rows)]
        sampler.reorder(
            BatchReorder.fresh(
                [
                    RowRequest(
                        token_ids=[1, 2],
                        prompt_length=1,
                        options=structs.replace(each, max_tokens=9),
                    )
                    for each in settings
                ]
            )
        )
        for size in (2, width):
            gpu.tree_ops.upload_tree(trees, *tree_buffers.random_trees(rng, rows, size))
            paths = sampler.verify(rows, size).result()
    sys.stdout.write(f"{[path.nodes for path in paths if path]}\n")


def run_images(gpu: CudaDevice) -> None:
    target = gpu.zeros("embeds", (2, 5, 33), HALF)
    gpu.image_ops.splice(target, 7, np.ones((3, 33), HALF))
    gpu.image_ops.clear(target, 10)
    tables = image_buffers.rotary_tables(gpu.constant)
    for row, positions in enumerate(image_buffers.ROW_POSITIONS):
        gpu.image_ops.fill_rotary(tables, row, positions)


def main() -> None:
    gpu = open_cuda_device()
    run_images(gpu)
    for index in (INT32, INT64):
        for out in (HALF, FLOAT):
            run_steps(gpu, index, out)
        run_sampler(gpu, index)
        for shape in (Shape(3, 10, 3, 2049), Shape(8, 1, 4, 1), Shape(2, 40, 2, 5000)):
            run_trees(gpu, index, shape)
    gpu.close()


if __name__ == "__main__":
    main()
