import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import IOTensor
from hearth.runtime.executor.engine_executor import check_bindings, check_known
from hearth.runtime.tensors.registry import TensorRegistry, TensorSpec

FLOAT = np.dtype(np.float32)
FITTING = IOTensor("x", "input", FLOAT, ("B", None, 8))


def _registry() -> TensorRegistry:
    registry = TensorRegistry()
    registry.add(TensorSpec("x", "input", FLOAT, ("batch", "seq_len", 8)))
    return registry


def test_a_fitting_engine_passes_with_bindings_of_its_own() -> None:
    check_bindings([FITTING, IOTensor("rope_cos", "input", FLOAT, (64, 4))], _registry())


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ([], "is missing"),
        ([FITTING._replace(direction="output")], "is an output"),
        ([FITTING._replace(dtype=np.dtype(np.float16))], "is float16"),
        ([FITTING._replace(shape=("B", None, 9))], "has shape"),
        ([FITTING._replace(shape=("B", 8))], "has shape"),
    ],
)
def test_a_binding_that_differs_is_named(engine: list[IOTensor], words: str) -> None:
    with pytest.raises(HearthError, match=f"binding x {words}") as caught:
        check_bindings(engine, _registry())
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "x")


def test_a_binding_that_nobody_would_bind_is_refused() -> None:
    rope, other = (FITTING._replace(name=name) for name in ("rope_cos", "layers.0/qkv"))
    with pytest.raises(HearthError, match="is unknown to this runtime") as caught:
        check_known([FITTING, rope, other], _registry())
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "layers.0/qkv")
