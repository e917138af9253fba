from typing import get_args

import ml_dtypes
import numpy as np
import pytest

from hearth.runtime.config import DType
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor, TensorMap, numpy_dtype


def test_a_tensor_tells_its_layout() -> None:
    array = np.zeros((2, 3), np.float16)
    tensor = Tensor("logits", array)
    assert (tensor.name, tensor.shape, tensor.dtype) == ("logits", (2, 3), np.dtype(np.float16))
    assert tensor.address == array.ctypes.data
    assert tensor.nbytes == 12


def test_a_view_is_dense_at_the_same_address() -> None:
    tensor = Tensor.zeros("x", (4, 4), np.dtype(np.float32))
    view = tensor.view((2, 3))
    view[:] = 1
    assert view.ctypes.data == tensor.address
    assert view.flags.c_contiguous
    assert tensor.array.reshape(-1).tolist() == [1.0] * 6 + [0.0] * 10


def test_views_of_different_shapes_take_turns() -> None:
    tensor = Tensor.zeros("x", (4, 4), np.dtype(np.float32))
    shapes = [(2, 3), (2, 3), (4, 4), (3, 2), (2, 3)]
    assert [tensor.view(shape).shape for shape in shapes] == shapes


def test_a_view_beyond_the_buffer_is_refused() -> None:
    with pytest.raises(HearthError, match=r"x for shape \(5, 4\)"):
        Tensor.zeros("x", (4, 4), np.dtype(np.float32)).view((5, 4))


def test_the_beginning_of_a_buffer_may_be_of_another_type() -> None:
    tensor = Tensor("bytes", np.arange(8, dtype=np.uint8))
    whole = tensor.beginning("x", (2, 1), np.dtype(np.uint32))
    assert (whole.address, whole.shape, whole.owner) == (tensor.address, (2, 1), tensor)
    assert whole.array.tolist() == [[0x03020100], [0x07060504]]
    assert tensor.beginning("none", (5, 0), np.dtype(np.float32)).address == tensor.address
    with pytest.raises(HearthError, match="bytes has no 12 bytes"):
        tensor.beginning("more", (3,), np.dtype(np.float32))
    elsewhere = Tensor.on_device("far", 4096, (8,), np.dtype(np.uint8), tensor)
    part = elsewhere.beginning("x", (2, 1), np.dtype(np.uint32))
    assert (part.address, part.nbytes, part.owner) == (4096, 8, elsewhere)


def test_a_buffer_with_gaps_is_refused() -> None:
    with pytest.raises(HearthError, match="not contiguous"):
        Tensor("x", np.zeros((4, 4))[:, ::2])


def test_device_memory_has_an_address_and_no_array() -> None:
    tensor = Tensor.on_device("logits", 4096, (2, 3), np.dtype(np.float16), owner="arena")
    assert (tensor.address, tensor.nbytes, tensor.owner) == (4096, 12, "arena")
    tensor.check((3, 2))
    with pytest.raises(HearthError, match=r"logits for shape \(7,\)"):
        tensor.check((7,))
    with pytest.raises(HearthError, match="device memory"):
        tensor.view((2, 3))


FLOAT = np.dtype(np.float32)


def test_names_lead_to_tensors() -> None:
    tensors = TensorMap()
    cache = Tensor.zeros("k_cache_0", (2,), FLOAT)
    tensors.set("k_cache_0", cache)
    tensors.set("present_k_cache_0", cache)
    assert tensors.get("present_k_cache_0") is tensors.get("k_cache_0")
    assert list(tensors) == ["k_cache_0", "present_k_cache_0"]
    assert len(tensors) == 2


def test_a_missing_binding_is_named() -> None:
    with pytest.raises(HearthError) as caught:
        TensorMap().get("lora_A_3")
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "lora_A_3")


def test_the_epoch_grows_exactly_when_a_buffer_changes() -> None:
    tensors = TensorMap()
    array = np.zeros(4, np.float32)
    tensors.set("x", Tensor("x", array))
    first = tensors.epoch
    tensors.set("x", Tensor("x", array))
    assert tensors.epoch == first
    tensors.set("x", Tensor("x", array[:2]))
    assert tensors.epoch == first + 1
    tensors.set("x", Tensor("x", np.zeros(4, np.float32)))
    assert tensors.epoch == first + 2
    tensors.set("y", Tensor("y", array))
    assert tensors.epoch == first + 3


def test_every_configured_type_has_a_numpy_type() -> None:
    assert {name: numpy_dtype(name) for name in get_args(DType)} == {
        "float32": np.dtype(np.float32),
        "float16": np.dtype(np.float16),
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
    }
