import ctypes
import math
import time
from collections.abc import Sequence

import numpy as np

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.launch import KernelLaunch, addresses, integers
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.programs import KernelLibrary
from hearth.runtime.device.cuda.sample_ring import RESULT, read_sample
from hearth.runtime.device.cuda.stream import CudaEvent, CudaStream
from hearth.runtime.device.cuda.upload import UploadRing
from hearth.runtime.device.cuda.wide_draws import THREADS, WideDraws
from hearth.runtime.device.device import AcceptedPath, TreeBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.request import NO_ROW, RowToken

_SCAN_THREADS = 256
_SLOTS = 4
# Blocks of a scan that a multiprocessor runs at a time, and nodes that a block can link.
_RESIDENT, _MOST_LINKED = 8, 1024
# Logits of all nodes, for each multiprocessor, that are drawn from in less time than one block a
# row takes for the nodes that are walked.
_MOST_LOGITS = 200_000
PARTIAL = np.dtype([("best", np.uint64), ("rest", np.uint32, (4,))])
_BEST = np.dtype([("best", np.uint64), ("raw", np.uint32), ("bad", np.uint32)])
_INT = np.dtype(np.int32)


class WalkArguments(ctypes.Structure):
    """`Walk` of csrc/tree/walk.cu."""

    _fields_ = (*addresses("ids parents scans picks partial done paths"), *integers("width levels"))


class _PathSlot:
    """Pinned paths and results of one round, which the kernel writes itself, and its event."""

    def __init__(self, context: CudaContext, memory: CudaMemory, shape: tuple[int, int]) -> None:
        rows, levels = shape
        self.paths = memory.pinned_zeros("accepted paths", (rows, 1 + levels), _INT)
        self.results = memory.pinned_zeros("accepted samples", shape, RESULT)
        self.tokens = self.results.array["token"]
        offset = self.tokens.ctypes.data - self.results.array.ctypes.data
        self.where = (
            self.paths.address,
            self.results.address + offset,
            RESULT.itemsize,
            levels,
        )
        self.event = CudaEvent(context)
        self.uses = 0


class RoundPace:
    """Estimate of the end of a round, in seconds from when all of it was queued."""

    def __init__(self) -> None:
        self.expected = 0.0
        """The shorter of the two newest: one slow round is no rule. 0 where nothing is known."""
        self._newest = math.inf

    def record(self, took: float, *, ahead: bool) -> None:
        """Record the time of a round; not `ahead`: it had ended before the host looked."""
        self.expected = min(took, self._newest) if ahead else 0.0
        self._newest = took if ahead else math.inf


class CudaPendingPaths:
    """The walks of a round that may still be running; `wanted` is each row's `logprobs`."""

    def __init__(
        self, slot: _PathSlot, stream: CudaStream, wanted: Sequence[int], pace: RoundPace
    ) -> None:
        slot.event.record(stream)
        self._pace, self._queued = pace, time.monotonic()
        slot.uses += 1
        self._slot = slot
        self._use = slot.uses
        self._wanted = wanted
        self._paths: list[AcceptedPath | None] | None = None

    @property
    def where(self) -> tuple[int, int, int, int]:
        """Addresses of the walks' paths and tokens, their stride in bytes, and most nodes."""
        return self._slot.where

    def result(self) -> list[AcceptedPath | None]:
        """Wait and read, once; raises the error of the round."""
        if self._paths is None:
            self._paths = self._read()
        return self._paths

    def _read(self) -> list[AcceptedPath | None]:
        if self._slot.uses != self._use:
            raise HearthError("internal", "the paths of a round were read too late")
        ahead = self._slot.event.wait_from(self._queued + self._pace.expected)
        self._pace.record(time.monotonic() - self._queued, ahead=ahead)
        rows = len(self._wanted)
        paths = self._slot.paths.array[:rows].tolist()
        longest = max((path[0] for path in paths), default=0)
        tokens = self._slot.tokens[:rows, : max(longest, 0)].tolist()
        return [
            None if count < 0 else AcceptedPath(self._samples(row, found[:count]), nodes[:count])
            for row, ((count, *nodes), found) in enumerate(zip(paths, tokens, strict=True))
        ]

    def _samples(self, row: int, tokens: list[int]) -> list[RowToken]:
        wanted = self._wanted[row]
        if wanted < 0:
            return [RowToken(NO_ROW, token) for token in tokens]
        results = self._slot.results.array[row]
        return [read_sample(results[i], wanted) for i in range(len(tokens))]


class TreeWalks:
    """Launches of the walks through the trees of all rows.

    All blocks sample tokens for all nodes, and a last launch walks along them. If all rows are
    plainly greedy the scan of the nodes does the walk as well. Trees with too many nodes for that
    are walked by one block a row, in one launch.
    """

    def __init__(
        self,
        library: KernelLibrary,
        memory: CudaMemory,
        ring: UploadRing,
        trees: TreeBuffers,
        *,
        batch: ctypes.Structure,
        vocab_size: int,
        wide: WideDraws,
        options: tuple[str, ...],
    ) -> None:
        self._vocab_size = vocab_size
        self._stream = library.stream
        rows, levels = self._shape = (trees.ids.shape[0], trees.ids.shape[1])
        self._multiprocessors = library.context.properties.multiprocessors
        nodes = rows * levels
        scans = memory.zeros("node scans", (nodes,), _BEST)
        picks = memory.zeros("node picks", (nodes,), RESULT)
        partial = memory.zeros("node partial results", (nodes,), PARTIAL)
        ring.upload(partial.address, empty_partial(nodes))
        done = memory.zeros("walk blocks", (rows,), np.dtype(np.uint32))
        self._slots = [_PathSlot(library.context, memory, self._shape) for _ in range(_SLOTS)]
        self._turn = 0
        self._pace = RoundPace()
        self._walk = WalkArguments(
            trees.ids.address,
            trees.parents.address,
            scans.address,
            picks.address,
            partial.address,
            done.address,
            levels=levels,
        )
        self._batch = batch
        self._wide = wide

        def prepare(name: str, threads: int, *more: ctypes.Structure) -> KernelLaunch:
            return library.prepare("tree/walk", name, options, threads, (batch, self._walk, *more))

        self._scan = prepare("scan_nodes", _SCAN_THREADS)
        self._draws = tuple(
            prepare(name, THREADS, wide.arguments) for name in ("weigh_nodes", "pick_nodes")
        )
        self._follow = prepare("follow_picks", _SCAN_THREADS)
        self._greedy = prepare("walk_greedy", _SCAN_THREADS)
        self._alone = prepare("walk_trees", THREADS)

    def launch(
        self,
        width: int,
        wanted: Sequence[int],
        blocks: int,
        stages: tuple[int, int],
        *,
        greedy: bool,
    ) -> CudaPendingPaths:
        """Queue the walks of a row for each of `wanted`; a node's scan takes `blocks` blocks.

        `stages` is what `Stages.of` says, `greedy` that no row has settings of its own.
        """
        rows = len(wanted)
        if rows > self._shape[0] or not 0 < width <= self._shape[1]:
            raise HearthError("internal", f"no trees of {width} nodes in {rows} rows")
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _SLOTS
        walk, nodes = self._walk, rows * width
        walk.width = width
        walk.paths = slot.paths.address
        self._batch.results = slot.results.address
        if rows == 0:
            pass
        elif width > _MOST_LINKED or not self._wins(nodes, blocks, greedy=greedy):
            self._alone.launch(rows)
        elif greedy:
            self._greedy.launch(blocks, nodes)
        else:
            self._scan.launch(blocks, nodes)
            stage, jobs = stages
            self._wide.launch(self._draws[:stage], nodes, jobs)
            self._follow.launch(rows)
        return CudaPendingPaths(slot, self._stream, wanted, self._pace)

    def _wins(self, nodes: int, blocks: int, *, greedy: bool) -> bool:
        """Return True if sampling all nodes at once takes less time than walking node by node."""
        if greedy:
            return min(nodes, nodes * blocks // _RESIDENT) <= self._multiprocessors
        return nodes * self._vocab_size <= _MOST_LOGITS * self._multiprocessors


def empty_partial(count: int) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
    """`Partial` of csrc/sampling/rows.cuh before the first block: [count]."""
    empty = np.zeros(count, PARTIAL)
    empty["best"] = ~np.uint64(0)
    return empty
