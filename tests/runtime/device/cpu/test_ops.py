from typing import Any

import numpy as np
import pytest

from hearth.runtime.device.cpu.ops import CpuStepOps
from hearth.runtime.device.device import StepBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device import tree_reference

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
