from collections.abc import Iterator

from runtime.errors import HearthError
from runtime.tensors.tensor import Tensor


class TensorMap:
    """Binding name to tensor, without owning it.

    `epoch` grows whenever a binding gets another buffer, so that what was derived from the map
    (a prepared step) is known to be out of date. Two names may share one tensor: an output that
    is written in place of its input.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._tensors: dict[str, Tensor] = {}

    def set(self, binding: str, tensor: Tensor) -> None:
        """Let `binding` mean `tensor`."""
        known = self._tensors.get(binding)
        if known is None or _layout(known) != _layout(tensor):
            self.epoch += 1
        self._tensors[binding] = tensor

    def get(self, binding: str) -> Tensor:
        """The tensor of `binding`; raises `engine_incompatible` naming it when there is none."""
        tensor = self._tensors.get(binding)
        if tensor is None:
            raise HearthError(
                "engine_incompatible",
                f"the engine has a binding {binding} that this runtime does not know: "
                "export the model again",
                binding,
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.address, tensor.shape, tensor.dtype
