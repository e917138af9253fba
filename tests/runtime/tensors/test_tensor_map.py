import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor, TensorMap

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
