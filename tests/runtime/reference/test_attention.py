import numpy as np
import pytest

from hearth.runtime.export.reference_pass import rotate, softmax
from hearth.runtime.reference.attention import attended, rotated, seen_slots
from hearth.runtime.reference.token_trees import pack_mask


@pytest.mark.parametrize("seen", [1, 63, 64, 65, 255, 256, 257, 700])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_splits_and_spans_are_one_softmax(seen: int, dtype: type) -> None:
    drawn = np.random.default_rng(seen)
    query = drawn.normal(size=48).astype(np.float32)
    keys, values = drawn.normal(size=(2, seen, 48)).astype(np.float32)
    shares = softmax(keys @ query)
    found = attended(query, keys, values, np.dtype(dtype))
    error = np.finfo(dtype).eps * (shares @ np.abs(values)) * 2
    assert (np.abs(found - shares @ values) <= error + 1e-6).all()


def test_who_sees_nothing_gets_zeros() -> None:
    nothing = np.zeros((0, 16), np.float16)
    assert not attended(np.ones(16), nothing, nothing, np.dtype(np.float16)).any()


def test_heads_are_turned_as_the_reference_turns_them() -> None:
    drawn = np.random.default_rng(0)
    heads = drawn.normal(size=(3, 5, 16)).astype(np.float32)
    angles = drawn.normal(size=(5, 4)).astype(np.float32)
    tables = (np.cos(angles), np.sin(angles))
    turned = rotated(heads, None, 0.0, tables, 0.25)
    assert np.allclose(turned, rotate(heads, *tables) / 4, atol=1e-6)
    gain = drawn.normal(size=16).astype(np.float32)
    normal = heads / np.sqrt(np.mean(np.square(heads), axis=-1, keepdims=True) + 0.5) * gain
    assert np.allclose(rotated(heads, gain, 0.5, tables, 1), rotate(normal, *tables), atol=1e-6)


def test_a_node_sees_its_path_behind_the_filled_slots() -> None:
    parents = np.full((1, 40), -1, np.int32)
    parents[0, [3, 9, 38, 39]] = [0, 3, 9, -2]
    mask = pack_mask(parents)[0]
    assert seen_slots(2, 38, mask[38]) == [0, 1, 2, 5, 11, 40]
    assert seen_slots(2, 39, mask[39]) == [0, 1]
    assert seen_slots(0, 39, mask[39]) == []
    assert seen_slots(2, 1, None) == [0, 1, 2, 3]
