from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.cpu.ops import CpuImageOps, CpuStepOps
from hearth.runtime.device.device import (
    AcceptedPath,
    BatchSampler,
    SamplerBuffers,
    StepBuffers,
    TreeBuffers,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.positions import RowPositions
from hearth.runtime.request import NO_ROW, RequestOptions, RowRequest, RowToken
from hearth.runtime.sampling import RowSampler, child_keys, sample_rows, walk_tree
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.arrangements import arrangements, keep, new_row
from tests.runtime.device import tree_reference
from tests.runtime.device.image_buffers import PAIRS, ROW_POSITIONS, SLOTS, rotary_tables

OPS = CpuStepOps()


def _buffers(index: type[Any], mask: Tensor | None = None) -> StepBuffers:
    table = np.arange(20, dtype=np.float32).reshape(10, 2)
    number = np.dtype(index)
    return StepBuffers(
        embedding=Tensor("embedding", table),
        next_tokens=Tensor.zeros("next_tokens", (3,), np.dtype(np.int32)),
        inputs_embeds=Tensor.zeros("inputs_embeds", (3, 4, 2), np.dtype(np.float32)),
        attention_pos_id=Tensor.zeros("attention_pos_id", (3, 4), number),
        last_token_ids=Tensor("last_token_ids", np.full((3, 1), 9, number)),
        lengths=Tensor("kvcache_start_index", np.array([6, 6, 0], number)),
        tree_mask=mask,
    )


@pytest.mark.parametrize("index", [np.int64, np.int32])
def test_a_prefill_is_fed_with_padding_at_position_zero(index: type[Any]) -> None:
    buffers = _buffers(index)
    OPS.feed_prefill(buffers, np.array([[1, 2, 3], [4, 0, 0]]), [3, 1])
    assert buffers.attention_pos_id.view((2, 3)).tolist() == [[6, 7, 8], [6, 0, 0]]
    assert buffers.last_token_ids.view((2, 1)).tolist() == [[2], [0]]
    assert buffers.inputs_embeds.view((2, 3, 2))[:, :, 0].tolist() == [[2, 4, 6], [8, 0, 0]]


@pytest.mark.parametrize("index", [np.int64, np.int32])
def test_a_decode_is_fed_with_the_newest_tokens(index: type[Any]) -> None:
    buffers = _buffers(index)
    buffers.next_tokens.array[:] = [7, -1, 5]
    OPS.feed_decode(buffers, 3)
    assert buffers.attention_pos_id.view((3, 1)).tolist() == [[6], [6], [0]]
    assert buffers.last_token_ids.array.tolist() == [[0], [0], [0]]
    assert buffers.inputs_embeds.view((3, 1, 2))[:, 0, 0].tolist() == [14, 0, 10]


def test_a_prefill_may_begin_at_other_positions_than_its_slots() -> None:
    buffers = _buffers(np.int64)
    OPS.feed_prefill(buffers, np.array([[1, 2, 3], [4, 0, 0]]), [3, 1], first=[9, 1])
    assert buffers.attention_pos_id.view((2, 3)).tolist() == [[9, 10, 11], [1, 0, 0]]
    assert buffers.lengths.array.tolist() == [6, 6, 0]


def test_masks_of_prefill_and_decode_are_causal() -> None:
    mask = Tensor.zeros("tree_mask", (3, 4, 4), np.dtype(np.bool_))
    buffers = _buffers(np.int64, mask)
    OPS.feed_prefill(buffers, np.array([[1, 2, 3], [4, 0, 0]]), [3, 1])
    causal = [[True, False, False], [True, True, False], [True, True, True]]
    assert mask.view((2, 3, 3)).tolist() == [causal, causal]
    mask.array[:] = False
    OPS.feed_decode(buffers, 3)
    assert mask.array.reshape(-1).tolist() == [True] * 3 + [False] * 45


def test_entries_are_fed_as_a_prompt_and_with_their_hidden_states() -> None:
    buffers, other = _buffers(np.int64), _buffers(np.int64)
    source = Tensor("source", np.arange(12, dtype=np.float32).reshape(2, 2, 3))
    out = Tensor.zeros("out", (3, 4, 3), np.dtype(np.float32))
    tokens = np.array([[1, 2], [4, 0]])
    grown = Tensor.zeros("grown", (3,), np.dtype(np.int64))
    places = [[3, 0], [-1, 1]]
    OPS.put_entries(buffers, tokens.tolist(), [2, 0], [9, 1], places, filled=[5, 2])
    OPS.feed_entries(buffers, source, out, grown, (2, 2))
    assert (buffers.lengths.array.tolist(), grown.array.tolist()) == ([5, 2, 0], [7, 2, 0])
    OPS.feed_prefill(other, tokens, [2, 1], [9, 1])
    other.lengths.array[:] = [5, 2, 0]
    for found, wanted in zip(buffers, other, strict=True):
        if found is not None and wanted is not None:
            assert np.array_equal(found.array, wanted.array)
    assert out.view((2, 2, 3)).tolist() == [[[9, 10, 11], [0, 1, 2]], [[0, 0, 0], [3, 4, 5]]]
    with pytest.raises(HearthError, match="were put for"):
        OPS.feed_entries(buffers, source, out, grown, (2, 1))


def test_packed_masks_of_prefill_and_decode_are_causal() -> None:
    width = 70
    packed = Tensor("packed_mask", np.full((2, width, 3), 9, np.int32))
    buffers = _buffers(np.int64)._replace(
        inputs_embeds=Tensor.zeros("inputs_embeds", (2, width, 2), np.dtype(np.float32)),
        attention_pos_id=Tensor.zeros("attention_pos_id", (2, width), np.dtype(np.int64)),
        packed_mask=packed,
    )
    OPS.feed_prefill(buffers, np.zeros((2, width), np.int64), [width, 1])
    causal = tree_reference.packed(list(range(-1, width - 1)))
    assert packed.array.tolist() == [causal, causal]
    OPS.feed_decode(buffers, 2)
    assert packed.array.reshape(-1)[:3].tolist() == [1, 1, causal[0][2]]


def test_lengths_are_set_and_advanced() -> None:
    start = Tensor("kvcache_start_index", np.array([6, 6, 9]))
    OPS.set_lengths(start, [3, 4])
    assert start.array.tolist() == [3, 4, 0]
    OPS.advance(start, 2)
    assert start.array.tolist() == [4, 5, 0]


VOCAB = 40
PROMPTS = ([3, 4, 5, 5], [9, 9], [1])
SAMPLING = (
    RequestOptions(repetition_penalty=1.7),
    RequestOptions(temperature=1.5, seed=8, frequency_penalty=0.9),
    RequestOptions(temperature=0.7, top_k=5, seed=1, logprobs=2),
)


def _requests() -> list[RowRequest]:
    return [
        RowRequest(
            token_ids=prompt,
            prompt_length=len(prompt),
            options=structs.replace(sampling, max_tokens=9),
        )
        for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
    ]


def _started(width: int = 1) -> tuple[BatchSampler, SamplerBuffers]:
    ids, parents = (
        Tensor.zeros(name, (3, width), np.dtype(np.int32)) for name in ("ids", "parents")
    )
    buffers = SamplerBuffers(
        logits=Tensor.zeros("logits", (3, width, VOCAB), np.dtype(np.float32)),
        lengths=Tensor("start", np.array([len(prompt) for prompt in PROMPTS])),
        next_tokens=Tensor.zeros("next_tokens", (3,), np.dtype(np.int32)),
        trees=TreeBuffers(ids, parents),
    )
    sampler = CpuDevice().batch_sampler(buffers)
    sampler.reorder(BatchReorder.fresh(_requests()))
    return sampler, buffers


def _logits(step: int, rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(step).normal(size=(rows, VOCAB)).astype(np.float32) * 3


def _sampler_of(row: RowRequest) -> RowSampler:
    return RowSampler(row.options, row.token_ids, row.prompt_length, VOCAB)


def _reference() -> list[RowSampler]:
    return [_sampler_of(row) for row in _requests()]


def test_rows_pick_what_they_pick_alone_over_a_growing_history_and_an_eviction() -> None:
    sampler, buffers = _started()
    alone = _reference()
    for step in range(8):
        if step == 4:
            sampler.reorder(keep(0, 2))
            del alone[1]
            buffers.lengths.array[:2] = buffers.lengths.array[[0, 2]]
        rows = len(alone)
        logits = buffers.logits.view((rows, VOCAB))
        logits[:] = _logits(step, rows)
        want = sample_rows(logits, alone, buffers.lengths.array[:rows].tolist())
        assert sampler.sample(rows).result() == want
        for one, sample in zip(alone, want, strict=True):
            assert sample is not None
            one.accept(sample.token_id)
        assert buffers.next_tokens.array[:rows].tolist() == [one.token_id for one in want if one]
        buffers.lengths.array[:] += 1


@settings(deadline=None)
@given(st.data())
def test_rows_pick_what_they_pick_alone_wherever_they_are_placed(data: st.DataObject) -> None:
    sampler, buffers = _started()
    alone, newest = _reference(), [0, 0, 0]
    for step in range(6):
        reorder = data.draw(arrangements([0] * len(alone), 3))
        requests = data.draw(st.lists(st.sampled_from(_requests()), min_size=3, max_size=3))
        assignments = [new_row(place, requests[place]) for place, *_ in reorder.assignments]
        reorder = reorder._replace(assignments=assignments)
        sampler.reorder(reorder)
        alone = reorder.settle(alone, lambda row: _sampler_of(row.request))
        newest = reorder.settle(newest, lambda _: -9)
        rows = reorder.rows
        kept = [place for place in range(rows) if newest[place] != -9]
        assert buffers.next_tokens.array[kept].tolist() == [newest[place] for place in kept]
        buffers.lengths.array[:] = 7 * step + np.arange(3)
        # Decoding rows are picked, of those behind them the first alone: its prompt has ended.
        decoding = data.draw(st.integers(0, rows))
        newest = buffers.next_tokens.array[:rows].tolist()
        for first, count, picked in (
            (0, decoding, None),
            (decoding, rows - decoding, min(1, rows - decoding)),
        ):
            logits = buffers.logits.view((count, VOCAB))
            logits[:] = _logits(step, count)
            end = count if picked is None else picked
            ready = alone[first : first + end]
            want = sample_rows(logits[:end], ready, range(7 * step + first, 7 * step + rows))
            samples = sampler.sample(count, first, picked).result()
            assert samples == [*want, *[RowToken(NO_ROW, -1)] * (count - end)]
            for place, (one, sample) in enumerate(zip(ready, want, strict=True), first):
                assert sample is not None
                one.accept(sample.token_id)
                newest[place] = sample.token_id
        assert buffers.next_tokens.array[:rows].tolist() == newest


def test_rows_with_prompt_left_are_only_checked() -> None:
    sampler, buffers = _started()
    logits = buffers.logits.view((3, VOCAB))
    logits[:] = _logits(0, 3)
    logits[2, 7] = np.inf
    buffers.next_tokens.array[:] = 5
    first, second, third = sampler.sample(3, picked=1).result()
    assert (second, third) == (RowToken(NO_ROW, -1), None)
    assert first is not None
    assert buffers.next_tokens.array.tolist() == [first.token_id, 5, 5]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    sampler, buffers = _started()
    logits = buffers.logits.view((3, VOCAB))
    logits[:] = _logits(0, 3)
    logits[1, 7] = np.nan
    samples = sampler.sample(3).result()
    assert [sample is None for sample in samples] == [False, True, False]
    assert buffers.next_tokens.array[1] == -1


WIDTH = 21


def _plant(buffers: SamplerBuffers, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Twenty tokens behind the root of each row but the second, which does not speculate."""
    assert buffers.trees is not None
    ids = buffers.trees.ids.view((rows, WIDTH))
    parents = buffers.trees.parents.view((rows, WIDTH))
    ids[:] = np.arange(WIDTH)
    parents[:] = [-1] + [0] * 10 + [3] * 10
    parents[1, 1:] = -2
    return ids, parents


def _tree_logits(step: int, rows: int) -> NDArray[np.float32]:
    logits = _logits(step, rows * WIDTH).reshape(rows, WIDTH, VOCAB)
    # Half of the tokens after a root are in its tree, and most of those behind node 3.
    logits[:, 0, 3] += 6
    logits[:, 3, 11:21] += 6
    return logits


def test_rows_walk_their_trees_as_they_do_alone_round_after_round() -> None:
    sampler, buffers = _started(WIDTH)
    alone = _reference()
    longest = 0
    for step in range(12):
        logits = buffers.logits.view((3, WIDTH, VOCAB))
        logits[:] = _tree_logits(step, 3)
        keys = child_keys(*_plant(buffers, 3))
        starts = buffers.lengths.array[:3].copy()
        paths = sampler.verify(3, WIDTH).result()
        for row, path in enumerate(paths):
            assert path is not None
            assert walk_tree(logits[row], keys[row], alone[row], int(starts[row]) + 1) == path
            assert buffers.next_tokens.array[row] == path.samples[-1].token_id
            longest = max(longest, len(path.nodes))
        assert paths[1] is not None
        assert paths[1].nodes == [0]
        starts += [len(path.nodes) for path in paths if path]
        assert np.array_equal(buffers.lengths.array[:3], starts)
    assert longest == 3


def test_rounds_and_steps_share_their_history() -> None:
    sampler, buffers = _started(WIDTH)
    alone = _reference()
    logits = buffers.logits.view((3, WIDTH, VOCAB))
    logits[:] = _tree_logits(0, 3)
    keys = child_keys(*_plant(buffers, 3))
    paths = sampler.verify(3, WIDTH).result()
    for row, one in enumerate(alone):
        walk = walk_tree(logits[row], keys[row], one, len(PROMPTS[row]) + 1)
        assert walk == paths[row]
    single = buffers.logits.view((3, VOCAB))
    single[:] = _logits(9, 3)
    wanted = sample_rows(single, alone, buffers.lengths.array.tolist())
    assert sampler.sample(3).result() == wanted


def test_a_row_that_is_not_finite_fails_its_round_alone() -> None:
    sampler, buffers = _started(WIDTH)
    logits = buffers.logits.view((3, WIDTH, VOCAB))
    logits[:] = _tree_logits(0, 3)
    _plant(buffers, 3)
    logits[0, 0, 5] = np.nan
    logits[2, 20, 5] = np.nan
    buffers.next_tokens.array[0] = 7
    first, second, third = sampler.verify(3, WIDTH).result()
    assert first is None
    assert isinstance(second, AcceptedPath)
    assert isinstance(third, AcceptedPath)
    newest = [7, second.samples[-1].token_id, third.samples[-1].token_id]
    assert buffers.next_tokens.array.tolist() == newest


def test_differences_beyond_float32_have_no_weight() -> None:
    sampler, buffers = _started(WIDTH)
    logits = buffers.logits.view((3, WIDTH, VOCAB))
    logits[:] = -3e38
    logits[:, 0, 3] = logits[:, 3, 15] = 3e38
    _plant(buffers, 3)
    third = sampler.verify(3, WIDTH).result()[2]
    assert third is not None
    assert [sample.token_id for sample in third.samples][:2] == [3, 15]


def test_trees_are_seen_in_the_shape_of_the_round() -> None:
    # Buffers are made for more nodes than a round of few has.
    sampler, buffers = _started(WIDTH)
    logits = buffers.logits.view((2, 2, VOCAB))
    logits[:] = 0
    logits[0, 0, 30] = logits[0, 1, 31] = logits[1, 0, 32] = logits[1, 1, 33] = 50
    assert buffers.trees is not None
    buffers.trees.ids.view((2, 2))[:] = [[0, 30], [0, 32]]
    buffers.trees.parents.view((2, 2))[:] = [[-1, 0], [-1, 0]]
    paths = sampler.verify(2, 2).result()
    tokens = [[sample.token_id for sample in path.samples] for path in paths if path]
    assert tokens == [[30, 31], [32, 33]]


def test_a_sampler_without_trees_refuses_a_round() -> None:
    _, buffers = _started()
    sampler = CpuDevice().batch_sampler(buffers._replace(trees=None))
    sampler.reorder(BatchReorder.fresh(_requests()))
    with pytest.raises(HearthError) as caught:
        sampler.verify(1, 1)
    assert caught.value.code == "internal"


def test_embeddings_take_the_place_of_others() -> None:
    buffer = Tensor("inputs_embeds", np.zeros((2, 4, 3), np.float32))
    CpuImageOps().splice(buffer, 3, np.arange(6, dtype=np.float32).reshape(2, 3))
    found = buffer.array.reshape(-1, 3)
    assert found[3:5].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.flatnonzero(found.any(axis=1)).tolist() == [3, 4]
    CpuImageOps().clear(buffer, 4)
    assert np.flatnonzero(buffer.array.reshape(-1, 3).any(axis=1)).tolist() == [4]


@pytest.mark.parametrize(
    ("place", "rows"),
    [
        (0, np.zeros((1, 4), np.float32)),
        (0, np.zeros((1, 3), np.float16)),
        (0, np.zeros(3, np.float32)),
        (7, np.zeros((2, 3), np.float32)),
        (-1, np.zeros((1, 3), np.float32)),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(place: int, rows: NDArray[Any]) -> None:
    buffer = Tensor("inputs_embeds", np.zeros((2, 4, 3), np.float32))
    with pytest.raises(HearthError, match="do not fit into inputs_embeds") as caught:
        CpuImageOps().splice(buffer, place, rows)
    assert caught.value.code == "internal"
    assert not buffer.array.any()


@pytest.mark.parametrize("positions", ROW_POSITIONS)
def test_each_pair_of_a_slot_is_that_of_its_position(positions: RowPositions) -> None:
    tables = rotary_tables(Tensor)
    CpuImageOps().fill_rotary(tables, 1, positions)
    last = len(tables.cos_of.array) - 1
    for slot in range(SLOTS):
        for pair in range(PAIRS):
            position = slot + positions.delta
            if slot < positions.prompt.shape[1]:
                position = int(positions.prompt[pair % 3, slot])
            position = min(position, last)
            assert tables.cos.array[1, slot, pair] == tables.cos_of.array[position, pair]
            assert tables.sin.array[1, slot, pair] == tables.sin_of.array[position, pair]
    assert (tables.cos.array[[0, 2]] == 9).all()
