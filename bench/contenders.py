"""What is timed beside one another: each takes a prompt, then one greedy token a step."""

from typing import Protocol, runtime_checkable

from bench.floor import MemoryReader
from bench.worker_messages import Job


class ContenderModel(Protocol):
    """A loaded model whose cache holds the prompt; `first` is its answer to the prompt."""

    precision: str
    first: int

    def step(self) -> int:
        """Decode one token, greedily, and return it."""


@runtime_checkable
class RawLaunches(Protocol):
    """A contender whose engine can run without what surrounds it."""

    def launch(self, steps: int) -> float:
        """Seconds of `steps` launches of the newest step, back to back until the last has ended."""


class FloorModel:
    """The memory-read floor as a contender; its tokens mean nothing."""

    precision = ""
    first = 0

    def __init__(self, job: Job) -> None:
        self._reader = MemoryReader(job.bytes, job.threads)

    def step(self) -> int:
        """Read the buffer as often as `floor.repeats` says."""
        self._reader.read()
        return 0


def load(job: Job) -> ContenderModel:
    """The contender of a job; raises ImportError when its library is not installed."""
    # Only the library that is measured enters the process.
    if job.contender == "hearth":
        from bench.hearth_model import HearthModel  # noqa: PLC0415 - as said above

        return HearthModel(job)
    if job.contender == "transformers":
        from bench.transformers_model import TransformersModel  # noqa: PLC0415 - likewise

        return TransformersModel(job)
    if job.contender == "llama_cpp":
        from bench.llama_cpp_model import LlamaCppModel  # noqa: PLC0415 - likewise

        return LlamaCppModel(job)
    if job.contender in {"static_cache", "torch_compile"}:
        from bench.static_cache_model import StaticCacheModel  # noqa: PLC0415 - likewise

        return StaticCacheModel(job)
    if job.contender == "gpu_floor":
        from bench.gpu_floor import GPUFloorModel  # noqa: PLC0415 - likewise

        return GPUFloorModel(job)
    return FloorModel(job)
