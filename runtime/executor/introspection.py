from collections.abc import Sequence

from runtime.errors import HearthError
from runtime.executor.engine import IOTensor
from runtime.tensors.registry import TensorRegistry, TensorSpec

_UNREGISTERED = ("rope_cos", "rope_sin")
"""Tables that all rows share: their shape follows no step."""


def check_bindings(io_tensors: Sequence[IOTensor], registry: TensorRegistry) -> None:
    """Compare an engine with the registry that its configuration gives.

    Raises `engine_incompatible` naming the first binding that is missing, that differs in
    direction, type, rank or a fixed size.
    """
    known = {tensor.name: tensor for tensor in io_tensors}
    for spec in (*registry.specs, *registry.own_specs):
        tensor = known.get(spec.name)
        if tensor is None:
            raise _mismatch(spec.name, "is missing")
        if tensor.direction != spec.direction:
            raise _mismatch(spec.name, f"is an {tensor.direction}, not an {spec.direction}")
        if tensor.dtype != spec.dtype:
            raise _mismatch(spec.name, f"is {tensor.dtype} instead of {spec.dtype}")
        if not _same_sizes(tensor, spec):
            raise _mismatch(spec.name, f"has shape {tensor.shape} instead of {spec.shape}")


def check_known(io_tensors: Sequence[IOTensor], registry: TensorRegistry) -> None:
    """Raise `engine_incompatible` naming the first binding that nothing would be bound to."""
    for tensor in io_tensors:
        if not registry.knows(tensor.name) and tensor.name not in _UNREGISTERED:
            raise _mismatch(tensor.name, "is unknown to this runtime")


def _same_sizes(tensor: IOTensor, spec: TensorSpec) -> bool:
    if len(tensor.shape) != len(spec.shape):
        return False
    pairs = zip(tensor.shape, spec.shape, strict=True)
    return all(
        have == want for have, want in pairs if isinstance(have, int) and isinstance(want, int)
    )


def _mismatch(name: str, what: str) -> HearthError:
    return HearthError(
        "engine_incompatible", f"the engine's binding {name} {what}: export the model again", name
    )
