import mmap
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Stream
from hearth.runtime.loading import ProgressCallback, no_progress
from hearth.runtime.tensors.registry import Direction
from hearth.runtime.tensors.tensor import Tensor
from hearth.runtime.vision_config import VisionConfig

EngineConfig = LLMEngineRunnerConfig | VisionConfig
"""The configuration of a decoder, a draft or a vision tower."""


class Initializers:
    """External initializers of a graph, kept for the life of its engine.

    `files` are mapped, by their names in the graph; `arrays` replace single tensors of the files.
    `held` keeps alive objects that a library made of both and does not own.
    """

    def __init__(self, files: Mapping[str, mmap.mmap], arrays: Mapping[str, NDArray[Any]]) -> None:
        self.files = files
        self.arrays = arrays
        self.held: list[object] = []

    def release_pages(self) -> None:
        """Release mapped pages that were read to be packed; a later read maps them again."""
        for file in self.files.values():
            file.madvise(mmap.MADV_DONTNEED)


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an engine: `threads` of the processor, 0 for all physical cores.

    With `ranks_alone` a draft need not turn logits into log probabilities: only their order is
    read. `progress` is called with the progress of compiling kernels.
    """

    threads: int = 0
    spin: bool = False
    ranks_alone: bool = False
    progress: ProgressCallback = no_progress


class IOTensor(NamedTuple):
    """Binding of an engine as it declares it; symbolic sizes are strings or None."""

    name: str
    direction: Direction
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...]


class Binding(NamedTuple):
    """One binding of one step: a dense array of `shape` at the beginning of a buffer."""

    name: str
    direction: Direction
    tensor: Tensor
    shape: tuple[int, ...]


class CapturedRun(Protocol):
    """A step that was prepared once and can be launched again without any binding."""

    def launch(self, stream: Stream, /) -> None:
        """Run the step; raises `executor_failed`."""

    def close(self) -> None:
        """Free the graph and its memory."""


class SelfContained:
    """Base of engines whose library allocates its own scratch memory and has no profiles."""

    required_context_memory = 0

    def set_context_memory(self, memory: Tensor) -> None:
        """Ignore `memory`."""

    def use_profile(self, _profile: int, _stream: Stream, /) -> None:
        """Do nothing: one set of shapes serves every step."""


class Engine(Protocol):
    """A loaded model of one device library, as `EngineExecutor` needs it."""

    @property
    def io_tensors(self) -> tuple[IOTensor, ...]:
        """All bindings, inputs first."""

    @property
    def required_context_memory(self) -> int:
        """Bytes of scratch memory that the caller must provide."""

    def set_context_memory(self, memory: Tensor) -> None:
        """Use `memory`, at least `required_context_memory` bytes, as scratch."""

    def use_profile(self, profile: int, stream: Stream, /) -> None:
        """Run the next steps with an optimisation profile, if the library has profiles.

        `EngineExecutor` calls this only when the profile changes.
        """

    def run(self, bindings: Sequence[Binding], stream: Stream, /) -> None:
        """Run one step; raises `executor_failed`.

        A step that is prepared again comes as the same tuple, so an engine that keeps its bindings
        finds by one identity test that it has nothing to set.
        """

    def capture(self, bindings: Sequence[Binding], stream: Stream, /) -> CapturedRun:
        """Keep a step for later launches; the step may run once or twice on the way."""

    def close(self) -> None:
        """Free the model."""


AddressAndShape = tuple[int, tuple[int, ...]]


class BindingSnapshot:
    """Addresses and shapes of all bindings of a step; `key` is their hash.

    Equality compares every address and size, never the key alone.
    """

    __slots__ = ("addresses", "bindings", "key")

    def __init__(self, bindings: tuple[AddressAndShape, ...], key: int | None = None) -> None:
        self.bindings = bindings
        self.addresses = tuple(address for address, _ in bindings)
        self.key = hash(bindings) if key is None else key

    @classmethod
    def of(cls, bindings: Iterable[Binding]) -> "BindingSnapshot":
        """The snapshot of a step's bindings, in their order."""
        return cls(tuple((one.tensor.address, one.shape) for one in bindings))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BindingSnapshot) and self.bindings == other.bindings

    def __hash__(self) -> int:
        return self.key


class GraphCounters(msgspec.Struct):
    """Counts of captured graphs, of failed captures (with the newest reason), and of steps.

    A step was launched from a graph (`hits`), found no graph that fits (`misses`), or found a graph
    that failed and ran without it (`fallbacks`).
    """

    captures: int = 0
    failed_captures: int = 0
    failure: str = ""
    hits: int = 0
    misses: int = 0
    fallbacks: int = 0

    @property
    def reason(self) -> str:
        """Sentence about the captures that failed."""
        return f"{self.failed_captures} steps are not captured: {self.failure}"


class GraphCache:
    """Captured graphs by binding hash; a graph is used only when its whole snapshot agrees.

    Graphs of the newest `address_sets` sets of addresses are kept.
    """

    def __init__(self, address_sets: int = 2) -> None:
        self.counters = GraphCounters()
        self._addresses: deque[tuple[int, ...]] = deque(maxlen=address_sets)
        self._graphs: dict[int, tuple[BindingSnapshot, CapturedRun]] = {}

    def find(self, snapshot: BindingSnapshot) -> CapturedRun | None:
        """The graph of exactly this snapshot."""
        entry = self._graphs.get(snapshot.key)
        if entry is None:
            return None
        known, graph = entry
        # A step that stays prepared brings the very snapshot with which it was captured.
        return graph if known is snapshot or known == snapshot else None

    def store(self, snapshot: BindingSnapshot, graph: CapturedRun) -> None:
        """Keep a graph; free an older graph of the same hash, and graphs of old addresses."""
        if snapshot.addresses not in self._addresses:
            self._addresses.append(snapshot.addresses)
        stale = [
            key
            for key, (known, _) in self._graphs.items()
            if key == snapshot.key or known.addresses not in self._addresses
        ]
        with ExitStack() as closing:
            for key in stale:
                closing.callback(self._graphs.pop(key)[1].close)
            self._graphs[snapshot.key] = (snapshot, graph)
            self.counters.captures += 1

    def expect(self, more: int) -> None:
        """Keep graphs of `more` further sets of addresses."""
        sets = (self._addresses.maxlen or 0) + more
        self._addresses = deque(self._addresses, maxlen=sets)

    def drop(self, addresses: tuple[int, ...]) -> None:
        """Free all graphs of these addresses."""
        if addresses in self._addresses:
            self._addresses.remove(addresses)
        stale = [key for key, (known, _) in self._graphs.items() if known.addresses == addresses]
        with ExitStack() as closing:
            for key in stale:
                closing.callback(self._graphs.pop(key)[1].close)

    def clear(self) -> None:
        """Free all graphs."""
        with ExitStack() as closing:
            while self._graphs:
                _, (_, graph) = self._graphs.popitem()
                closing.callback(graph.close)

    def __len__(self) -> int:
        return len(self._graphs)


_TOPOLOGY = Path("/sys/devices/system/cpu")


def physical_cores(topology: Path = _TOPOLOGY) -> int:
    """Number of cores that this process may use; hyper-threads of a core count once."""
    allowed = os.sched_getaffinity(0)
    cores = {_core_of(topology, cpu) for cpu in allowed}
    return max(1, len(cores))


def _core_of(topology: Path, cpu: int) -> str:
    siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    try:
        return siblings.read_text().strip()
    except OSError:
        # No topology is told (some containers): every logical processor counts as a core.
        return str(cpu)
