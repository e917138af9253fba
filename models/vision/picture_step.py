"""One step about pictures: its losses and gradients, on a GPU replayed as one CUDA graph."""

import traceback

import torch
from torch import Tensor

from models.vision.forward import Reader
from models.vision.guide import Guide, picture_losses
from models.vision.stream import Batch

_WARM: int = 4  # steps before the capture, in which everything is compiled


class PictureStep:
    """Computes gradients into the parameters' `grad`, over what was there before."""

    def __init__(self, reader: Reader, guide: Guide, device: str) -> None:
        self._reader, self._guide, self._device = reader, guide, device
        self._trained = [*reader.tower.parameters(), *reader.decoder.parameters()]
        self._trained += guide.parameters()
        self._factor = torch.ones((), device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch = {}
        self._losses: tuple[Tensor, Tensor] | None = None

    def _compute(self, batch: Batch) -> tuple[Tensor, Tensor]:
        on = self._device == "cuda"
        with torch.autocast(self._device, torch.bfloat16, enabled=on, cache_enabled=False):
            seen, guided = picture_losses(self._reader, self._guide, batch)
        (seen + self._factor * guided).backward()
        return seen.detach(), guided.detach()

    def _forget(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    def capture(self, batch: Batch) -> None:
        """Record the step for batches of this shape, while no other thread uses the GPU.

        Where that fails, steps are launched kernel by kernel.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                self._forget()
                self._compute(batch)
        torch.cuda.current_stream().wait_stream(side)
        self._forget()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._losses = self._compute(batch)
        except RuntimeError:
            traceback.print_exc()
            self._forget()
            torch.cuda.synchronize()
            return
        self._graph, self._batch = graph, batch

    def __call__(self, batch: Batch, factor: float) -> tuple[Tensor, Tensor]:
        """Return the loss of the answers and that of the guide, which counts by `factor`."""
        self._factor.fill_(factor)
        same = self._graph and batch["pixels"].shape == self._batch["pixels"].shape
        if self._graph and self._losses and same:
            for name, tensor in self._batch.items():
                tensor.copy_(batch[name])
            self._graph.replay()
            return self._losses
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad.zero_()
        return self._compute(batch)
