import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.batch import RowMove
from hearth.runtime.device.cache_storage import check_pages
from hearth.runtime.device.cuda.element_types import copy_unit, index_type
from hearth.runtime.device.cuda.launch import KernelLaunch, addresses, integers
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.programs import KernelLibrary
from hearth.runtime.device.cuda.upload import UploadRing
from hearth.runtime.errors import HearthError
from hearth.runtime.reference.ops import PageCopy
from hearth.runtime.tensors.tensor import Tensor

MOVES = 64


class RowsArguments(ctypes.Structure):
    """`Rows` of csrc/step/cache.cu: `buffers` is the address of a table of addresses."""

    _fields_ = (*addresses("buffers"), *integers("heads slots width"))


class Moves(ctypes.Structure):
    """`Moves` of csrc/step/cache.cu, passed by value."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("source", ctypes.c_int32 * MOVES),
        ("target", ctypes.c_int32 * MOVES),
        ("used", ctypes.c_int32 * MOVES),
    )

    def fill(self, moves: Sequence[RowMove]) -> None:
        """Take at most `MOVES` moves."""
        self.count = len(moves)
        for i, move in enumerate(moves):
            self.source[i], self.target[i], self.used[i] = move


def prepare_moves(
    library: KernelLibrary, unit: str, rows: RowsArguments, moves: Moves
) -> KernelLaunch:
    """The launch that moves rows of `unit`s; both structures are read when it is launched."""
    options = ("-DINDEX=int", f"-DUNIT={unit}")
    return library.prepare("step/cache", "move_rows", options, _THREADS, (rows, moves))


def queue_moves(
    launch: KernelLaunch, rows: RowsArguments, table: Moves, moves: Sequence[RowMove], buffers: int
) -> None:
    """Queue `moves`, in one launch up to `MOVES` of them; raises as `check_order`."""
    check_order(moves)
    needed = [move for move in moves if move.source != move.target and move.used > 0]
    for first in range(0, len(needed), MOVES):
        part = needed[first : first + MOVES]
        table.fill(part)
        units = min(max(move.used for move in part), rows.slots) * rows.width
        launch.launch(-(-units // _THREADS), rows.heads, buffers)


def check_order(moves: Sequence[RowMove]) -> None:
    """Raise `internal` if a source or a target is the target of an earlier move."""
    written: set[int] = set()
    for source, target, _ in moves:
        if source in written or target in written:
            raise HearthError("internal", f"rows cannot be moved in this order: {list(moves)}")
        written.add(target)


PAGES = 64


class PagesArguments(ctypes.Structure):
    """`Pages` of csrc/step/cache.cu, passed by value."""

    _fields_ = (
        *addresses("pool"),
        *integers("page_tokens save"),
        *((name, ctypes.c_int32 * PAGES) for name in PageCopy._fields),
    )


class PageCopies:
    """Launches that copy between rows and pages, all buffers in one."""

    def __init__(self, library: KernelLibrary, unit: str, rows: RowsArguments) -> None:
        self._rows, self._pages = rows, PagesArguments()
        options = ("-DINDEX=int", f"-DUNIT={unit}")
        self._launch = library.prepare(
            "step/cache", "copy_pages", options, _THREADS, (rows, self._pages)
        )

    def queue(self, pool: Tensor, copies: Sequence[PageCopy], *, save: bool) -> None:
        """Queue checked copies, in one launch up to `PAGES` of them."""
        pages = self._pages
        _, buffers, heads, tokens, _ = pool.shape
        pages.pool, pages.page_tokens, pages.save = pool.address, tokens, int(save)
        needed = [copy for copy in copies if copy.tokens]
        for first in range(0, len(needed), PAGES):
            part = needed[first : first + PAGES]
            for name, values in zip(PageCopy._fields, zip(*part, strict=True), strict=True):
                getattr(pages, name)[: len(part)] = values
            units = heads * max(copy.tokens for copy in part) * self._rows.width
            self._launch.launch(-(-units // _THREADS), len(part), buffers)


_INT = np.dtype(np.int32)


class PathArguments(ctypes.Structure):
    """`Path` of csrc/step/cache.cu."""

    _fields_ = (*addresses("nodes"), *integers("rows count"))


class PathCommit:
    """Launch that moves the slots of accepted nodes in all buffers."""

    def __init__(
        self,
        library: KernelLibrary,
        memory: CudaMemory,
        ring: UploadRing,
        unit: str,
        rows: RowsArguments,
    ) -> None:
        self._memory, self._ring = memory, ring
        self._table: Tensor | None = None
        self._path = PathArguments()
        options = ("-DINDEX=int", f"-DUNIT={unit}")
        self._launch = library.prepare(
            "step/cache", "commit_path", options, _THREADS, (rows, self._path)
        )

    def launch(
        self, nodes: NDArray[np.int32], starts: Sequence[int], units: int, buffers: int
    ) -> None:
        """Queue the moves of checked `nodes` [rows, n] for `units` units of a slot, all heads."""
        rows, count = nodes.shape
        packed = np.concatenate((nodes.reshape(-1), starts)).astype(_INT)
        table = self._table
        if table is None or table.shape[0] < packed.size:
            table = self._table = self._memory.zeros("accepted nodes", (2 * packed.size,), _INT)
        self._ring.upload(table.address, packed)
        self._path.nodes, self._path.rows, self._path.count = table.address, rows, count
        self._launch.launch(-(-units // _THREADS), rows, buffers)


def check_path(nodes: NDArray[np.int32], starts: Sequence[int], slots: int) -> bool:
    """Return True if any of `nodes` [rows, n] moves; `internal` unless they ascend and fit."""
    rows, count = nodes.shape
    if len(starts) != rows:
        raise HearthError("internal", f"{rows} paths have {len(starts)} starts")
    if not nodes.size:
        return False
    before, after = nodes[:, :-1], nodes[:, 1:]
    ascends = (after < 0) | ((before >= 0) & (before < after))
    # A row without nodes ends before its start.
    ends = np.asarray(starts) + nodes.max(axis=1)
    if not ascends.all() or (ends >= slots).any():
        raise HearthError("internal", f"the paths {nodes.tolist()} do not ascend within a cache")
    return bool((nodes > np.arange(count)).any())


_THREADS = 256
_ADDRESS = np.dtype(np.uint64)
# Enough blocks for the slots of a head; each goes on to further units.
_ZERO_BLOCKS = 32


class CudaCacheStorage:
    """The K/V buffers of all layers in device memory; every op but the reads is one launch."""

    def __init__(
        self,
        library: KernelLibrary,
        memory: CudaMemory,
        ring: UploadRing,
        buffers: Sequence[Tensor],
        *,
        heads: int,
        head_dim: int,
    ) -> None:
        self._library = library
        self._ring = ring
        self._buffers = tuple(buffers)
        self._dtype = self._buffers[0].dtype
        if any(buffer.dtype != self._dtype for buffer in self._buffers):
            raise HearthError("internal", "the buffers of a cache differ in type")
        self._heads, self._head_dim = heads, head_dim
        self._slot_bytes = head_dim * self._dtype.itemsize
        size, self._unit = copy_unit(self._slot_bytes)
        count = len(self._buffers)
        self._table = memory.zeros("cache addresses", (count,), _ADDRESS)
        self._fresh_table = memory.zeros("new row addresses", (count,), _ADDRESS)
        ring.upload(self._table.address, _addresses(self._buffers))
        self._fresh: tuple[Tensor, ...] | None = None
        self._rows = RowsArguments(self._table.address, heads, 0, self._slot_bytes // size)
        self._moves = Moves()
        self._move = prepare_moves(library, self._unit, self._rows, self._moves)
        self._zero = library.prepare(
            "step/cache",
            "zero_slots",
            self._options("int"),
            _THREADS,
            (self._rows, *(ctypes.c_int32() for _ in range(3))),
        )
        self._path = PathCommit(library, memory, ring, self._unit, self._rows)
        self._pages = PageCopies(library, self._unit, self._rows)
        self._writes: dict[Tensor, KernelLaunch] = {}

    def write(
        self,
        fresh: Sequence[Tensor],
        start: Tensor,
        shape: tuple[int, int, int],
        first: int = 0,
    ) -> None:
        """Put new rows [B, heads, S, D] from slot `start` on; `shape` is (B, S, slots).

        Tokens outside of a row's cache slots are dropped.
        """
        rows, steps, slots = shape
        if not rows * steps:
            return
        self._use_slots(slots, first + rows)
        tensors = tuple(fresh)
        # Tensors compare by identity: in a steady decode nothing is uploaded or compared.
        if tensors is not self._fresh and tensors != self._fresh:
            self._take_fresh(tensors)
        launch = self._writes.get(start) or self._prepare_write(start)
        launch.arguments[3].value, launch.arguments[4].value = steps, first
        units = self._heads * steps * self._rows.width
        launch.launch(-(-units // _THREADS), rows, len(self._buffers))

    def move(self, moves: Sequence[RowMove], slots: tuple[int, int]) -> None:
        """Move rows in their order; raises `internal` when the slots change."""
        if slots[0] != slots[1]:
            raise HearthError("internal", "the slots of a cache in device memory cannot change")
        self._use_slots(slots[0], max((max(move[:2]) for move in moves), default=-1) + 1)
        queue_moves(self._move, self._rows, self._moves, moves, len(self._buffers))

    def commit_path(self, nodes: NDArray[np.int32], starts: Sequence[int], slots: int) -> None:
        """Move slot `starts[b] + nodes[b, i]` to `starts[b] + i`; `nodes` [rows, n] ascends."""
        self._use_slots(slots, nodes.shape[0])
        if check_path(nodes, starts, slots):
            self._path.launch(nodes, starts, self._heads * self._rows.width, len(self._buffers))

    def zero(self, row: int, begin: int, end: int, slots: int) -> None:
        """Zero the slots from `begin` to `end` of a row, in every buffer."""
        if not 0 <= begin <= end <= slots:
            raise HearthError("internal", f"a row of {slots} slots has none from {begin} to {end}")
        self._use_slots(slots, row + 1)
        for argument, value in zip(self._zero.arguments[1:], (row, begin, end), strict=True):
            argument.value = value
        blocks = min(_ZERO_BLOCKS, -(-(end - begin) * self._rows.width // _THREADS))
        if blocks:
            self._zero.launch(blocks, self._heads, len(self._buffers))

    def save(self, pool: Tensor, copies: Sequence[PageCopy], slots: int) -> None:
        """Copy slots of rows into pages of device or pinned memory."""
        self._copy_pages(pool, copies, slots, save=True)

    def load(self, pool: Tensor, copies: Sequence[PageCopy], slots: int) -> None:
        """Copy pages of device or pinned memory into slots of rows."""
        self._copy_pages(pool, copies, slots, save=False)

    def read_row(self, row: int, length: int, slots: int) -> list[NDArray[Any]]:
        """Copies of a row's first slots, [heads, length, D] a buffer; waits for the device."""
        self._use_slots(slots, row + 1)
        shape = (self._heads, length, self._head_dim)
        arrays: list[NDArray[Any]] = [np.empty(shape, self._dtype) for _ in self._buffers]
        for buffer, array in zip(self._buffers, arrays, strict=True):
            self._copy(buffer, row, array, slots, to_host=True)
        self._library.stream.synchronize()
        return arrays

    def write_row(self, row: int, arrays: Sequence[NDArray[Any]], slots: int) -> None:
        """Write copies back into a row; waits for the device."""
        self._use_slots(slots, row + 1)
        for buffer, array in zip(self._buffers, arrays, strict=True):
            shape = (self._heads, array.shape[1], self._head_dim)
            if array.dtype != self._dtype or array.shape != shape or shape[1] > slots:
                raise HearthError("internal", f"a saved row of {buffer.name} does not fit")
            self._copy(buffer, row, np.ascontiguousarray(array), slots, to_host=False)
            # The array is pageable and may be a temporary copy.
            self._library.stream.synchronize()

    def _copy_pages(
        self, pool: Tensor, copies: Sequence[PageCopy], slots: int, *, save: bool
    ) -> None:
        check_pages(pool, self._buffers, copies, self._buffers[0].shape[0], slots)
        self._use_slots(slots, max((copy.row for copy in copies), default=-1) + 1)
        self._pages.queue(pool, copies, save=save)

    def _copy(
        self, buffer: Tensor, row: int, array: NDArray[Any], slots: int, *, to_host: bool
    ) -> None:
        driver = self._library.context.driver
        width = array.shape[1] * self._slot_bytes
        if not width:
            return
        pitch = slots * self._slot_bytes
        device = buffer.address + row * self._heads * pitch
        plan = driver.api.CUDA_MEMCPY2D()
        kinds = driver.api.CUmemorytype
        host, own = kinds.CU_MEMORYTYPE_HOST, kinds.CU_MEMORYTYPE_DEVICE
        plan.WidthInBytes, plan.Height = width, self._heads
        if to_host:
            plan.srcMemoryType, plan.srcDevice, plan.srcPitch = own, device, pitch
            plan.dstMemoryType, plan.dstHost, plan.dstPitch = host, array.ctypes.data, width
        else:
            plan.srcMemoryType, plan.srcHost, plan.srcPitch = host, array.ctypes.data, width
            plan.dstMemoryType, plan.dstDevice, plan.dstPitch = own, device, pitch
        driver.call("cuMemcpy2DAsync", plan, self._library.stream.native)

    def _use_slots(self, slots: int, rows: int) -> None:
        """Take the shape of a call, which must lie within the buffers."""
        if rows * self._heads * slots * self._slot_bytes > self._buffers[0].nbytes:
            raise HearthError(
                "internal", f"{rows} rows of {slots} slots exceed {self._buffers[0].name}"
            )
        self._rows.slots = slots

    def _take_fresh(self, fresh: tuple[Tensor, ...]) -> None:
        if len(fresh) != len(self._buffers) or any(new.dtype != self._dtype for new in fresh):
            raise HearthError("internal", "the new rows do not agree with the cache")
        self._ring.upload(self._fresh_table.address, _addresses(fresh))
        self._fresh = fresh

    def _prepare_write(self, start: Tensor) -> KernelLaunch:
        arguments = (
            self._rows,
            ctypes.c_uint64(self._fresh_table.address),
            ctypes.c_uint64(start.address),
            ctypes.c_int32(),
            ctypes.c_int32(),
        )
        options = self._options(index_type(start.dtype, start.name))
        launch = self._library.prepare("step/cache", "write_rows", options, _THREADS, arguments)
        self._writes[start] = launch
        return launch

    def _options(self, index: str) -> tuple[str, ...]:
        return (f"-DINDEX={index}", f"-DUNIT={self._unit}")


def _addresses(tensors: Sequence[Tensor]) -> NDArray[np.uint64]:
    return np.array([tensor.address for tensor in tensors], np.uint64)
