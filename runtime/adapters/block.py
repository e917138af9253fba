"""Where the inputs of an adapter lie in one block of memory."""

from collections.abc import Collection, Iterable
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.adapters.adapter import Adapter, Projection
from runtime.tensors.lora import RANK, LoraInput
from runtime.tensors.tensor import Tensor

_INT = np.dtype(np.int32)
_ALIGNMENT = 256
"""Bytes to a multiple of which every input begins."""


class _Place(NamedTuple):
    first: int
    shape: tuple[int, int]


class BlockLayout:
    """The inputs of an adapter of `rank`, one behind the other, `size` elements in all.

    With `used` these are the inputs of the projections that it names, else all. Where a block
    `tells_rank` the adapter's rank is the first number in it.
    """

    def __init__(
        self,
        inputs: Iterable[LoraInput],
        rank: int,
        dtype: np.dtype[Any],
        used: Collection[Projection] | None = None,
        *,
        tells_rank: bool = False,
    ) -> None:
        self._rank, self._dtype, self._tells_rank = rank, dtype, tells_rank
        self.size = _ALIGNMENT // dtype.itemsize if tells_rank else 0
        self._places: list[tuple[LoraInput, _Place, _Place]] = []
        for pair in inputs:
            if used is None or any((pair.layer, target) in used for target in pair.targets):
                wide, outputs = len(pair.targets) * rank, sum(pair.outputs)
                if pair.transposed:
                    a, b = self._take(wide, pair.inputs), self._take(outputs, rank)
                else:
                    a, b = self._take(pair.inputs, wide), self._take(wide, outputs)
                self._places.append((pair, a, b))

    def filled(self, adapter: Adapter) -> NDArray[Any]:
        """A block with the numbers of an adapter of this rank or a smaller one."""
        block: NDArray[Any] = np.zeros(self.size, self._dtype)
        if self._tells_rank:
            block.view(np.int32)[0] = adapter.rank
        for pair, *places in self._places:
            a, b = (block[first : first + prod(shape)].reshape(shape) for first, shape in places)
            for index, target in enumerate(pair.targets):
                part = adapter.parts.get((pair.layer, target))
                if part is None:
                    continue
                first, rank = index * self._rank, part.a.shape[1]
                if pair.transposed:
                    a[first : first + rank] = part.a.T
                    b[pair.columns[index], :rank] = part.b.T
                else:
                    rows = slice(first, first + rank)
                    a[:, rows], b[rows, pair.columns[index]] = part
        return block

    def tensors(self, block: Tensor) -> dict[str, Tensor]:
        """The inputs in a block, by binding."""
        told = {RANK: block.beginning(RANK, (1,), _INT)} if self._tells_rank else {}
        return told | {
            name: block.part(name, *place)
            for pair, a, b in self._places
            for name, place in ((pair.a, a), (pair.b, b))
        }

    def _take(self, *shape: int) -> _Place:
        unit = _ALIGNMENT // self._dtype.itemsize
        place = _Place(self.size, shape)  # type: ignore[arg-type] # two sizes
        self.size += -(-prod(shape) // unit) * unit
        return place


def no_inputs(inputs: Iterable[LoraInput], zeros: Tensor) -> dict[str, Tensor]:
    """All inputs with rank 0, at the address of `zeros`, by binding."""
    return {
        name: zeros.part(name, 0, shape)
        for pair in inputs
        for name, shape in ((pair.a, (pair.inputs, 0)), (pair.b, (0, sum(pair.outputs))))
    }
