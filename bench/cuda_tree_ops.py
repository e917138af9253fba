import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from bench.cuda_clock import Clock, Figures
from bench.cuda_shapes import (
    FLOAT,
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
from runtime.device.device import ProposalBuffers, SamplerBuffers, StepBuffers, TreeBuffers
from runtime.options import EagleDraftingConfig
from runtime.request import RequestOptions, RowRequest

BOOL = np.dtype(np.bool_)
# A draft of the usual vocabulary and the default tree.
DRAFT_VOCAB = 32_000
DRAFTING = EagleDraftingConfig()
# Nodes of a walk: what a good draft reaches.
DEPTH = 4


def time_trees(clock: Clock, rows: int) -> Figures:
    """The ops of a proposal and of the step that verifies its tree."""
    gpu, ops = clock.gpu, clock.gpu.tree_ops
    top_k, slots, nodes = DRAFTING.drafting_top_k, DRAFTING.proposal_size, DRAFTING.tree_size
    proposal = _proposal(clock, rows)
    logits = np.random.default_rng(0).standard_normal((rows, top_k, DRAFT_VOCAB))
    gpu.ring.upload(proposal.logits.address, (logits - 5).astype(np.float32))
    trees, steps = _trees(clock, rows), _steps(clock, rows)
    every = np.zeros((rows, nodes), np.int32)
    draft = (rows, slots, top_k)
    index = np.zeros((rows, DRAFTING.most_accepted), np.int32)
    wide = gpu.zeros("wide", (rows, nodes, 3 * HIDDEN), HALF)
    kept = gpu.zeros("kept", (rows, DRAFTING.most_accepted, 3 * HIDDEN), HALF)
    level = DRAFTING.drafting_step - 3
    # Without a start every table would be empty.
    ops.begin_proposal(proposal, rows, top_k)
    return {
        **clock.time("begin", lambda: ops.begin_proposal(proposal, rows, top_k)),
        **clock.time(
            "feed_draft", lambda: ops.feed_proposal(steps, proposal, steps.lengths, draft)
        ),
        **clock.time(
            "extend", lambda: ops.extend_proposal(proposal, rows, top_k, level, last=False)
        ),
        **clock.time("finish", lambda: ops.finish_proposal(proposal, trees, [True] * rows, nodes)),
        **clock.time("feed_verify", lambda: ops.feed_verify(steps, trees, rows, nodes)),
        **clock.time("plant", lambda: ops.plant(trees, every, every - 1), 6),
        **clock.time("gather", lambda: ops.gather_rows(wide, nodes, index, kept), 12),
    }


WALKS = {
    "greedy": RequestOptions(),
    "drawn": RequestOptions(temperature=0.8),
    "top_p": RequestOptions(temperature=0.8, top_p=0.9),
    "penalties": RequestOptions(repetition_penalty=1.1),
}


def time_walks(clock: Clock, rows: int) -> Figures:
    """Walks of four nodes through trees of the default size, by kind of setting."""
    gpu, nodes = clock.gpu, DRAFTING.tree_size
    logits = np.random.default_rng(0).standard_normal((rows, nodes, VOCAB)).astype(np.float32)
    ids, parents = _chains(rows, nodes)
    for node in range(DEPTH):
        logits[:, node, node + 1] += np.float32(40)
    trees = _trees(clock, rows)
    gpu.tree_ops.plant(trees, ids, parents)
    buffers = SamplerBuffers(
        logits=gpu.constant("logits", logits),
        lengths=gpu.zeros("start", (rows,), INT64),
        next_tokens=gpu.zeros("next", (rows,), INT32),
        trees=trees,
    )
    sampler = gpu.batch_sampler(buffers)
    figures: Figures = {}
    for name, params in WALKS.items():
        row = RowRequest(
            token_ids=[VOCAB - 1] * 3,
            prompt_length=2,
            options=structs.replace(params, max_tokens=9),
        )
        sampler.begin([row] * rows)
        figures |= clock.time(f"verify_{name}", lambda: sampler.verify(rows, nodes), 20)
    return figures


def time_commit(clock: Clock, rows: int) -> Figures:
    """The slots of a path of four nodes, three of which move, in all layers."""
    gpu = clock.gpu
    caches = [gpu.zeros("cache", (rows, HEADS, SLOTS, HEAD_DIM), HALF) for _ in range(2 * LAYERS)]
    storage = gpu.cache_storage(caches, HEADS, HEAD_DIM)
    nodes = np.array([[0, 3, 17, 40]] * rows, np.int32)
    return clock.time("commit", lambda: storage.commit_path(nodes, [500] * rows, SLOTS), 12)


def _chains(rows: int, nodes: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """A chain of `DEPTH` nodes, and the others as children of the root with another token."""
    ids = np.full((rows, nodes), VOCAB - 1, np.int32)
    parents = np.zeros((rows, nodes), np.int32)
    ids[:, :DEPTH] = np.arange(DEPTH)
    parents[:, :DEPTH] = np.arange(DEPTH) - 1
    return ids, parents


def _steps(clock: Clock, rows: int) -> StepBuffers:
    gpu, nodes = clock.gpu, DRAFTING.tree_size
    return StepBuffers(
        embedding=gpu.zeros("table", (VOCAB, HIDDEN), HALF),
        next_tokens=gpu.zeros("next", (rows,), INT32),
        inputs_embeds=gpu.zeros("embeds", (rows, nodes, HIDDEN), HALF),
        attention_pos_id=gpu.zeros("positions", (rows, nodes), INT64),
        last_token_ids=gpu.zeros("select", (rows, nodes), INT64),
        lengths=gpu.zeros("start", (rows,), INT64),
        tree_mask=gpu.zeros("mask", (rows, nodes, nodes), BOOL),
    )


def _trees(clock: Clock, rows: int) -> TreeBuffers:
    nodes = DRAFTING.tree_size
    return TreeBuffers(
        clock.gpu.zeros("ids", (rows, nodes), INT32),
        clock.gpu.zeros("parents", (rows, nodes), INT32),
        clock.gpu.zeros("packed mask", (rows, nodes, -(-nodes // 32)), INT32),
    )


def _proposal(clock: Clock, rows: int) -> ProposalBuffers:
    gpu, top_k = clock.gpu, DRAFTING.drafting_top_k
    slots, entries = (rows, DRAFTING.proposal_size), (rows, DRAFTING.table_size)
    return ProposalBuffers(
        logits=gpu.zeros("logits", (rows, top_k, DRAFT_VOCAB), FLOAT),
        hidden_states=gpu.zeros("hidden out", (rows, top_k, HIDDEN), HALF),
        hidden_states_from_draft=gpu.zeros("hidden in", (*slots, HIDDEN), HALF),
        full_ids=gpu.zeros("full ids", (DRAFT_VOCAB,), INT32),
        ids=gpu.zeros("ids", slots, INT32),
        parents=gpu.zeros("parents", slots, INT32),
        entries=gpu.zeros("entries", slots, INT32),
        table_ids=gpu.zeros("table ids", entries, INT32),
        table_parents=gpu.zeros("table parents", entries, INT32),
        table_scores=gpu.zeros("table scores", entries, FLOAT),
    )
