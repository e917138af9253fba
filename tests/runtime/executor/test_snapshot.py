import numpy as np

from hearth.runtime.executor.engine import BindingSnapshot
from tests.runtime.executor.fake_engine import host_binding


def _snapshot(*arrays: np.ndarray) -> BindingSnapshot:
    return BindingSnapshot.of(host_binding(str(i), "input", one) for i, one in enumerate(arrays))


def test_a_snapshot_holds_address_and_shape_of_every_binding() -> None:
    array = np.zeros((2, 3))
    assert _snapshot(array).bindings == ((array.ctypes.data, (2, 3)),)


def test_equal_bindings_are_equal_snapshots() -> None:
    array = np.zeros((2, 3))
    assert _snapshot(array, array) == _snapshot(array, array)
    assert hash(_snapshot(array)) == hash(_snapshot(array))


def test_another_address_shape_rank_or_order_is_another_snapshot() -> None:
    array, other = np.zeros((2, 3)), np.zeros((2, 3))
    kept = _snapshot(array, other)
    for differs in (
        _snapshot(array, array),
        _snapshot(array, other[:1]),
        _snapshot(array, other.reshape(1, 2, 3)),
        _snapshot(other, array),
        _snapshot(array),
    ):
        assert kept != differs
        assert kept.key != differs.key


def test_equality_looks_beyond_the_key() -> None:
    assert BindingSnapshot(((1, (2,)),), key=7) != BindingSnapshot(((1, (3,)),), key=7)
    assert BindingSnapshot(((1, (2,)),)) != "another kind of thing"
