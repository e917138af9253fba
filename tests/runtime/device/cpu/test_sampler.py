import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder, SlotAssignment
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import AcceptedPath, BatchSampler, SamplerBuffers, TreeBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.sampling import RowSampler, Sample, child_keys, sample_rows, walk_tree
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.arrangements import arrangements, keep

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


@given(st.data())
def test_rows_pick_what_they_pick_alone_wherever_they_are_placed(data: st.DataObject) -> None:
    sampler, buffers = _started()
    alone, newest = _reference(), [0, 0, 0]
    for step in range(6):
        reorder = data.draw(arrangements([0] * len(alone), 3))
        requests = data.draw(st.lists(st.sampled_from(_requests()), min_size=3, max_size=3))
        assignments = [SlotAssignment(place, requests[place]) for place, *_ in reorder.assignments]
        reorder = reorder._replace(assignments=assignments)
        sampler.reorder(reorder)
        alone = reorder.settle(alone, lambda assignment: _sampler_of(assignment.request))
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
            assert samples == [*want, *[Sample(-1)] * (count - end)]
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
    assert (second, third) == (Sample(-1), None)
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
