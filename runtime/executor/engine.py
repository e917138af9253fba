import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Stream
from hearth.runtime.loading import Told, nobody
from hearth.runtime.tensors.registry import Direction
from hearth.runtime.tensors.tensor import Tensor
from hearth.runtime.vision_config import VisionConfig

EngineConfig = LLMEngineRunnerConfig | VisionConfig
"""The configuration of a decoder, a draft or a vision tower."""


class Initializers:
    """External initializers of a graph, kept for the life of its engine.

    `files` are mapped, by the names that the graph has for them; `arrays` replace single tensors
    of these. `held` keeps alive the objects that a library made of them and does not own.
    """

    def __init__(self, files: Mapping[str, mmap.mmap], arrays: Mapping[str, NDArray[Any]]) -> None:
        self.files = files
        self.arrays = arrays
        self.held: list[object] = []

    def release_pages(self) -> None:
        """Let go of pages that were read to be packed; what is still read comes back by itself."""
        for file in self.files.values():
            file.madvise(mmap.MADV_DONTNEED)


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an engine: `threads` of the processor, 0 for all physical cores.

    With `ranks_alone` a draft need not turn logits into log probabilities: their order is all that
    is read of them. `told` is called with the progress of compiling kernels.
    """

    threads: int = 0
    spin: bool = False
    ranks_alone: bool = False
    told: Told = nobody


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
        """Free what the capture holds."""


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
        """Make the next steps those of an optimisation profile, where the library has them.

        `EngineExecutor` calls this only when the profile changes.
        """

    def run(self, bindings: Sequence[Binding], stream: Stream, /) -> None:
        """Run one step; raises `executor_failed`.

        A step that is prepared again comes as the same tuple, so that an engine which keeps its
        bindings can see with one identity test that nothing has to be set.
        """

    def capture(self, bindings: Sequence[Binding], stream: Stream, /) -> CapturedRun:
        """Keep a step for later launches; the step may run once or twice on the way."""

    def close(self) -> None:
        """Free the model."""


AddressAndShape = tuple[int, tuple[int, ...]]


class BindingSnapshot:
    """Addresses and shapes of all bindings of a step; `key` is a hash of all of these.

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
