import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import DeviceKind
from hearth.runtime.device.cuda.compiler import KernelCompiler, load_compiler_api
from hearth.runtime.device.cuda.context import CudaContext, DeviceProperties, open_context
from hearth.runtime.device.cuda.graph import CudaGraph, GraphCapture
from hearth.runtime.device.cuda.launch import KernelLaunch, addresses, integers
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.ops import CudaStepOps
from hearth.runtime.device.cuda.programs import KernelLibrary
from hearth.runtime.device.cuda.sampler import CudaBatchSampler
from hearth.runtime.device.cuda.storage import CudaCacheStorage
from hearth.runtime.device.cuda.stream import CudaEvent, CudaSpan, CudaStream
from hearth.runtime.device.cuda.tree_ops import CudaTreeOps
from hearth.runtime.device.cuda.upload import UploadRing, bulk_upload
from hearth.runtime.device.device import RotaryTables, SamplerBuffers, check_splice
from hearth.runtime.errors import HearthError
from hearth.runtime.files import cache_folder
from hearth.runtime.image_processing.positions import RowPositions
from hearth.runtime.tensors.tensor import Tensor
from hearth.runtime.undo import undoing

_THREADS = 64
_RING_SLOTS, _RING_BYTES = 8, 1 << 20
"""A chunk has a megabyte of embeddings and more: they get pinned memory of their own."""


class RotaryArguments(ctypes.Structure):
    """`Rotary` of csrc/step/rotary.cu."""

    _fields_ = (
        *addresses("cos_of sin_of axes positions cos sin"),
        *integers("pairs last length delta"),
    )


class CudaImageOps:
    """Ops that copy embeddings to a step's inputs, and fill rotary tables by a kernel."""

    def __init__(self, library: KernelLibrary, memory: CudaMemory, ring: UploadRing) -> None:
        self._library, self._memory, self._ring = library, memory, ring
        self._stream = library.stream
        self._embeddings = UploadRing(
            library.context, memory, library.stream, _RING_SLOTS, _RING_BYTES
        )
        self._rotary: dict[RotaryTables, tuple[Tensor, KernelLaunch]] = {}

    def splice(self, target: Tensor, place: int, rows: NDArray[Any]) -> None:
        """Copy `rows` over the rows of the buffer from `place` on."""
        check_splice(target, place, rows)
        first = place * target.shape[-1] * rows.itemsize
        self._embeddings.upload(target.address + first, rows)

    def clear(self, target: Tensor, places: int) -> None:
        """Zero the first rows of a buffer."""
        shape = (places, target.shape[-1])
        target.check(shape)
        self._stream.zero(target.address, prod(shape) * target.dtype.itemsize)

    def fill_rotary(self, tables: RotaryTables, row: int, positions: RowPositions) -> None:
        """Fill cosine and sine of a row."""
        _, slots, pairs = tables.cos.shape
        prompt, delta = positions
        if prompt.shape[1] > slots:
            raise HearthError("internal", f"{prompt.shape[1]} positions in {slots} slots")
        made = self._rotary.get(tables)
        if made is None:
            made = self._rotary[tables] = self._prepare(tables)
        places, launch = made
        self._ring.upload(places.address, prompt)
        arguments = launch.arguments[0]
        first = row * slots * pairs * tables.cos.dtype.itemsize
        arguments.cos, arguments.sin = tables.cos.address + first, tables.sin.address + first
        arguments.length, arguments.delta = prompt.shape[1], delta
        launch.launch(slots)

    def _prepare(self, tables: RotaryTables) -> tuple[Tensor, KernelLaunch]:
        _, slots, pairs = tables.cos.shape
        places = self._memory.zeros("prompt positions", (3, slots), np.dtype(np.int32))
        arguments = RotaryArguments(
            tables.cos_of.address,
            tables.sin_of.address,
            tables.axes.address,
            places.address,
            pairs=pairs,
            last=tables.cos_of.shape[0] - 1,
        )
        return places, self._library.prepare(
            "step/rotary", "fill_rotary", (), _THREADS, (arguments,)
        )


_LOADING_BYTES = 4 << 20
"""Pieces in which weights are loaded."""


class CudaDevice:
    """One GPU: its memory, one stream, and the ops as kernels.

    The thread that made it may use it; another thread calls `context.make_current` first. Kernels
    are compiled at their first use, and kept on disk in the compiler's folder. The device owns the
    context from here on, and closes it also if the constructor fails.
    """

    kind: DeviceKind = "cuda"
    steps_ahead = 1

    def __init__(self, context: CudaContext, compiler: KernelCompiler, reserve: int = 0) -> None:
        self.context = context
        with undoing() as undo:
            undo.callback(context.close)
            self.stream = CudaStream(context)
            undo.callback(self.stream.close)
            self._copies = CudaStream(context)
            undo.callback(self._copies.close)
            self._event = CudaEvent(context)
            self.memory = CudaMemory(context, reserve)
            undo.callback(self.memory.close)
            undo.callback(context.close_events)
            self.ring = UploadRing(context, self.memory, self.stream)
            self.library = KernelLibrary(context, self.stream, compiler)
            undo.callback(self.library.close)
        self._closing = undo
        self.ops = CudaStepOps(self.library, self.memory, self.ring)
        self.tree_ops = CudaTreeOps(self.library, self.memory, self.ring)

    @cached_property
    def image_ops(self) -> CudaImageOps:
        """Ops for images, made on first use as they take pinned memory."""
        return CudaImageOps(self.library, self.memory, self.ring)

    @property
    def properties(self) -> DeviceProperties:
        """Properties of the GPU."""
        return self.context.properties

    def zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Zeroed device memory; raises `out_of_memory` naming the tensor and its bytes."""
        return self.memory.zeros(name, shape, dtype)

    def host_zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Zeroed pinned memory; raises as `zeros`."""
        return self.memory.pinned_zeros(name, shape, dtype)

    def transfer(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy of a buffer into another of the same size."""
        if source.nbytes != target.nbytes:
            raise HearthError("internal", f"{source.name} is to be copied into {target.name}")
        self.stream.copy(target.address, source.address, source.nbytes)

    def constant(self, name: str, array: NDArray[Any]) -> Tensor:
        """A copy of `array` in device memory, which is complete when this returns."""
        tensor = self.memory.zeros(name, array.shape, array.dtype)
        self.ring.upload(tensor.address, array)
        self.stream.synchronize()
        return tensor

    def constants(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """Copies of `arrays`, complete when this returns, as fast as the device takes them.

        Raises `out_of_memory` naming the array and its bytes.
        """
        tensors = {
            name: self.memory.zeros(name, array.shape, array.dtype)
            for name, array in arrays.items()
        }
        flat = (
            (tensors[name].address, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            for name, array in arrays.items()
        )
        bulk_upload(self.context, self.stream, flat, slot_bytes=_LOADING_BYTES)
        return tensors

    def put(self, target: Tensor, array: NDArray[Any]) -> None:
        """Write an array into a buffer by way of pinned memory."""
        target.check(array.shape)
        self.ring.upload(target.address, array)

    def copy(self, target: Tensor, source: Tensor | None) -> None:
        """Queue a copy within the device, or zeros."""
        if source is None:
            self.stream.zero(target.address, target.nbytes)
        else:
            self.stream.copy(target.address, source.address, target.nbytes)

    def read(self, tensor: Tensor) -> NDArray[Any]:
        """A copy of a device tensor on the host, after all queued work; for tests and dumps."""
        array: NDArray[Any] = np.empty(tensor.shape, tensor.dtype)
        self.stream.copy_out(array.ctypes.data, tensor.address, tensor.nbytes)
        self.stream.synchronize()
        return array

    def record_event(self) -> CudaEvent:
        """Record an event behind all queued work; the last recorded event is void."""
        self._event.record(self.stream)
        return self._event

    def span(self) -> CudaSpan:
        """A span that begins behind all queued work."""
        return CudaSpan(self.context, self.stream)

    def fetch(self, source: Tensor, out: NDArray[Any]) -> None:
        """Copy the beginning of a buffer on a second stream, without waiting for queued work."""
        if not out.flags.c_contiguous:
            raise HearthError("internal", f"{source.name} is to be copied into pieces", source.name)
        self._copies.copy_out(out.ctypes.data, source.address, out.nbytes)
        self._copies.synchronize()

    def capture(self) -> GraphCapture:
        """A context manager that captures the work that its block queues on the stream."""
        return GraphCapture(self.context, self.stream)

    def record(self, work: Callable[[], None]) -> CudaGraph:
        """Capture the launches of `work` as a graph, after one run: loading cannot be captured."""
        work()
        self.stream.synchronize()
        with self.capture() as capture:
            work()
        return capture.graph

    def free_memory(self) -> int | None:
        """Bytes free beside the context; None where the memory is the host's."""
        return self.context.free_memory()

    def cache_storage(
        self, buffers: Sequence[Tensor], heads: int, head_dim: int
    ) -> CudaCacheStorage:
        """The storage of these K/V buffers, with its moves and writes."""
        return CudaCacheStorage(
            self.library, self.memory, self.ring, buffers, heads=heads, head_dim=head_dim
        )

    def batch_sampler(self, buffers: SamplerBuffers) -> CudaBatchSampler:
        """A sampler over these buffers."""
        return CudaBatchSampler(self.library, self.memory, self.ring, buffers)

    def close(self) -> None:
        """Wait for the device and free everything; calling it twice is harmless.

        All calls are made even if one of them raises. After `device_lost` nothing is left to free.
        """
        if not self.stream.handle:
            return
        try:
            with self._closing.pop_all() as closing:
                self._wait_or_forget(closing)
        except HearthError as error:
            if error.code != "device_lost":
                raise

    def _wait_or_forget(self, closing: ExitStack) -> None:
        try:
            self.stream.synchronize()
        except HearthError as error:
            if error.code == "device_lost":
                closing.pop_all()
            raise


def open_cuda_device(ordinal: int = 0, reserve: int = 0, kernels: Path | None = None) -> CudaDevice:
    """GPU `ordinal` with `reserve` bytes of memory taken at once; compiled code in `kernels`.

    Raises `engine_incompatible` where driver, GPU or compiler are missing, `out_of_memory`.
    """
    with undoing() as undo:
        context = open_context(ordinal)
        undo.callback(context.close)
        compiler = KernelCompiler(
            load_compiler_api(),
            context.properties.architecture,
            kernels or cache_folder() / "kernels",
        )
    return CudaDevice(context, compiler, reserve)
