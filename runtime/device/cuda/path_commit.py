import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.device.cuda.launch import addresses, integers
from runtime.device.cuda.memory import CudaMemory
from runtime.device.cuda.programs import KernelLibrary
from runtime.device.cuda.row_moves import RowsArguments
from runtime.device.cuda.upload import UploadRing
from runtime.errors import HearthError
from runtime.tensors.tensor import Tensor

_THREADS = 256
_INT = np.dtype(np.int32)


class PathArguments(ctypes.Structure):
    """`Path` of csrc/step/cache.cu."""

    _fields_ = (*addresses("nodes"), *integers("rows count"))


class PathCommit:
    """Moves the slots of accepted nodes, all buffers in one launch."""

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
    """Whether any of `nodes` [rows, n] moves; raises `internal` unless they ascend and fit."""
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
