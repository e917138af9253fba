"""A driver that keeps account of what it gave out, and fails at one call of its life."""

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

from tests.runtime.device.cuda.fake_driver import CUresult, FakeDriver

_MADE = {
    "cuDevicePrimaryCtxRetain": "context",
    "cuStreamCreate": "stream",
    "cuEventCreate": "event",
    "cuModuleLoadData": "module",
    "cuStreamEndCapture": "graph",
    "cuGraphInstantiate": "executable",
    "cuMemAlloc": "memory",
    "cuMemHostAlloc": "pinned",
}
_FREED = {
    "cuDevicePrimaryCtxRelease": "context",
    "cuStreamDestroy": "stream",
    "cuEventDestroy": "event",
    "cuModuleUnload": "module",
    "cuGraphDestroy": "graph",
    "cuGraphExecDestroy": "executable",
    "cuMemFree": "memory",
    "cuMemFreeHost": "pinned",
}
# Which argument of a call names something that must still be there.
_USED = {
    "cuEventRecord": ("event", 0),
    "cuEventQuery": ("event", 0),
    "cuEventSynchronize": ("event", 0),
    "cuStreamSynchronize": ("stream", 0),
    "cuStreamBeginCapture": ("stream", 0),
    "cuStreamEndCapture": ("stream", 0),
    "cuMemcpyHtoDAsync": ("stream", 3),
    "cuMemsetD8Async": ("stream", 3),
    "cuLaunchKernel": ("stream", 8),
    "cuGraphLaunch": ("executable", 0),
}
_DEVICE = 0


class ResourceDriver(FakeDriver):
    """`alive` has what was given out and not given back, `misuse` what was freed or used wrongly.

    Call number `failing_call` has the result `status`; after an illegal address every later call
    has it too. What a call that failed should have freed counts as given back.
    """

    CU_MEMHOSTALLOC_PORTABLE = 1
    CU_MEMHOSTALLOC_DEVICEMAP = 2

    def __init__(
        self, failing_call: int = -1, status: CUresult = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    ) -> None:
        super().__init__()
        self.results["cuModuleGetFunction"] = ("kernel",)
        self.results["cuGraphGetNodes"] = ([], 0)
        self.failing_call, self.status = failing_call, status
        self.count = 0
        self.failed: str | None = None
        self.lost = False
        self.alive: dict[tuple[str, int], Any] = {}
        self.misuse: list[str] = []
        self._next = 1 << 20

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            return self._call(name, arguments)

        return call

    def give(self, kind: str, value: Any = None) -> int:
        """Note something that must be given back, and return its number."""
        number = _DEVICE if kind == "context" else self._number()
        self.alive[kind, number] = value
        return number

    def take(self, kind: str, number: int) -> None:
        """Note that something was given back."""
        if self.alive.pop((kind, number), self) is self:
            self.misuse.append(f"{kind} {number} is freed and not there")
        if kind == "context" and self.alive:
            self.misuse.append(f"the context goes before {sorted({one for one, _ in self.alive})}")

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _call(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.count += 1
        kind, place = _USED.get(name, ("", 0))
        if kind and (kind, int(arguments[place])) not in self.alive:
            self.misuse.append(f"{name} uses a {kind} that is gone")
        if name in _FREED:
            self.take(_FREED[name], int(arguments[0]))
        status = self._status(name)
        if status:
            return (status, None) if name == "cuStreamEndCapture" else (status,)
        if name in ("cuMemAlloc", "cuMemHostAlloc"):
            return (status, self._allocate(_MADE[name], arguments[0]))
        made = _MADE.get(name)
        return (status, *(self.results.get(name, ()) if made is None else (self.give(made),)))

    def _status(self, name: str) -> CUresult:
        if self.count == self.failing_call:
            self.failed = name
            self.lost = self.status is CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        failing = self.lost or self.count == self.failing_call
        return self.status if failing else CUresult.CUDA_SUCCESS

    def _allocate(self, kind: str, size: int) -> int:
        # Pages that nobody writes are never there.
        block = (ctypes.c_uint8 * size).from_buffer(mmap.mmap(-1, size))
        address = ctypes.addressof(block)
        self.alive[kind, address] = block
        return address
