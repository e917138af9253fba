"""Steps of a training as CUDA graphs: the host launches one graph for thousands of kernels."""

import traceback
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from models.vision.stream import Batch

_WARM: Final = 3  # steps before a capture, in which everything is compiled

Compute = Callable[[Batch], Tensor]


def _key(batch: Batch) -> tuple[object, ...]:
    return tuple((name, tuple(tensor.shape)) for name, tensor in sorted(batch.items()))


class Captured:
    """Graphs by shape that compute losses and accumulate their gradients."""

    def __init__(self, compute: Compute, pool: tuple[int, int] | None = None) -> None:
        """Wrap `compute`, which runs backward and returns losses; gradients must be there."""
        self._compute = compute
        self.pool = pool
        self._graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}

    def capture(self, batch: Batch) -> bool:
        """Record the step for batches of this shape, while no other thread uses the GPU.

        Return whether that worked: where it did not, steps are launched kernel by kernel.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                self._compute(batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                losses = self._compute(batch)
        except RuntimeError:
            traceback.print_exc()
            torch.cuda.synchronize()
            return False
        self.pool = self.pool or graph.pool()
        self._graphs[_key(batch)] = graph, batch, losses
        return True

    def __call__(self, batch: Batch) -> Tensor:
        """Return the losses, detached."""
        known = self._graphs.get(_key(batch))
        if known is None:
            return self._compute(batch)
        graph, static, losses = known
        for name, tensor in static.items():
            tensor.copy_(batch[name])
        graph.replay()
        return losses
