"""Contenders timed side by side: each takes a prompt, then gives one greedy token a step."""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, Literal

import msgspec

from hearth.runtime.errors import HearthError

ContenderName = Literal[
    "floor", "hearth", "transformers", "llama_cpp", "static_cache", "torch_compile", "gpu_floor"
]
Device = Literal["cpu", "cuda"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a contender: `path` of its model, `prompt` as ids, and `steps` to reserve.

    `precision` is one of `torch_models.PRECISIONS`, or empty for the fastest of them.
    `bytes` is the size of the floor's buffer, or what a pass on a GPU reads; `spin` is Hearth's
    setting, None for its default.
    `batch` rows have the same prompt; `capture` prepares Hearth's graphs as the executor does.
    `device` and `capacity`, the slots of a static cache, are for the peers on a GPU.
    """

    contender: ContenderName
    path: str = ""
    threads: int = 1
    prompt: list[int] = []
    steps: int = 0
    precision: str = ""
    bytes: int = 0
    spin: bool | None = None
    batch: int = 1
    capture: bool = False
    device: Device = "cpu"
    capacity: int = 0


class Contender(ABC):
    """A model in this process, made of a job; `precision` is what it calculates in, if it says."""

    precision = ""

    def prefill(self) -> int:
        """Put the prompt into the cache, once, and return the answer, which is 0 from a floor."""
        return 0

    @abstractmethod
    def step(self) -> int:
        """Decode one token of every row, greedily, and return that of the first."""

    def launch(self, steps: int) -> float:  # noqa: ARG002 - for those that have an engine
        """Seconds of `steps` launches of the newest step, with no work around them."""
        raise HearthError("internal", "this contender has no launches of its own")

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what the end of the process would not."""


# Only the library that is measured enters the process.
_CLASSES: dict[ContenderName, str] = {
    "floor": "floor:MemoryFloor",
    "gpu_floor": "gpu_floor:GPUFloor",
    "hearth": "hearth_model:HearthModel",
    "llama_cpp": "llama_cpp_model:LlamaCppModel",
    "static_cache": "torch_models:StaticCacheModel",
    "torch_compile": "torch_models:StaticCacheModel",
    "transformers": "torch_models:TransformersModel",
}


PACKAGES = {"torch": "torch", "transformers": "transformers", "llama_cpp": "llama-cpp-python"}
"""The peers' libraries, and what installs each."""


def open_contender(job: Job) -> Contender:
    """The contender of a job; raises `unsupported_option` when its library is not installed."""
    target = f"hearth.bench.contenders.{_CLASSES[job.contender]}"
    contender: Contender = open_class(target, job, "case")
    return contender


def open_class(target: str, job: Any, field: str) -> Any:
    """An object of the class `module:name`, made of a job; raises as `open_contender`."""
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)(job)
    except ImportError as error:
        if error.name not in PACKAGES:
            raise
        raise HearthError("unsupported_option", missing([error.name]), field) from error


def missing(libraries: list[str]) -> str:
    """One line on peers' libraries that are absent: what installs them."""
    names = [PACKAGES.get(name, name) for name in libraries]
    are = "is" if len(names) == 1 else "are"
    return (
        f"{', '.join(names)} {are} not installed: make bench-env, or pip install {' '.join(names)}"
    )
