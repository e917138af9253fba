"""Kernel cache: compiles the kernels of an engine that are not in the cache folder."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cuda.compiler import (
    KernelCompiler,
    KernelConfig,
    kernel_source,
    load_compiler_api,
)
from hearth.runtime.device.cuda.context import (
    FIRST_WITH_DEPENDENTS,
    CudaContext,
    DeviceProperties,
    open_context,
)
from hearth.runtime.device.cuda.gpu_facts import LARGEST, GpuFacts
from hearth.runtime.engine_folder import DRAFT_FOLDER
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.kernels.engine import compiler_threads, wanted_kernels
from hearth.runtime.files import cache_folder
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.tensors.registry import (
    build_registry_for_llm,
    build_registry_for_spec_decode_draft,
)
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager
from hearth.runtime.weights.weights_file import load_layout

Progress = Callable[[str, int, int], None]
# KiB of shared memory that a block may ask for, by compute capability; a KiB more is there in all
# (CUDA C++ Programming Guide, technical specifications).
_SHARED_KIB = {
    **dict.fromkeys([(8, 0), (8, 7)], 163),
    **dict.fromkeys([(8, 6), (8, 9), (12, 0), (12, 1)], 99),
    **dict.fromkeys([(9, 0), (10, 0), (10, 3), (11, 0)], 227),
}
# Multiprocessors of those boards that are all of a compute capability: Orin, Thor, DGX Spark.
_BOARDS = {(8, 7): (4, 8, 14, 16), (11, 0): (12, 20), (12, 1): (48,)}


class KernelCache(msgspec.Struct, frozen=True, kw_only=True):
    """Programs of kernels that an engine wants when it is opened, and those that are there."""

    wanted: int
    compiled: int


class Target(NamedTuple):
    """A GPU that kernels are for, by the compiler's name and by what their shape follows from."""

    architecture: str
    facts: GpuFacts


def check_has_kernels(config: LLMEngineRunnerConfig) -> None:
    """Raise `unsupported_option` for an engine that another library runs."""
    if config.backend != "kernels":
        raise HearthError(
            "unsupported_option",
            f"this engine is for {config.backend}, which compiles nothing ahead: only Hearth's own "
            "kernels are compiled",
            "compile",
        )


def gpu_at_hand(opening: Callable[[], CudaContext] = open_context) -> Target:
    """The first GPU; raises `engine_incompatible` where there is none."""
    context = opening()
    try:
        return Target(context.properties.architecture, GpuFacts.of(context))
    finally:
        context.close()


def targets_of(text: str) -> list[Target]:
    """GPUs of a compute capability, and of so many multiprocessors: `8.7:16`.

    Without a number they are all boards of that compute capability, where these are few. Raises
    `invalid_value`.
    """
    capability, colon, count = text.partition(":")
    major, _, minor = capability.partition(".")
    known = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
    if known not in _SHARED_KIB or count.isdecimal() != bool(colon):
        raise _no_target(f"{text} is no compute capability with a number of multiprocessors")
    counts = (int(count),) if count else _BOARDS.get(known, ())
    if not counts or not all(counts):
        raise _no_target(f"GPUs of compute capability {capability} differ in size")
    shared, cluster = _SHARED_KIB[known], LARGEST if known >= FIRST_WITH_DEPENDENTS else 1
    return [
        Target(
            DeviceProperties("", known, one, integrated=False).architecture,
            GpuFacts(known, one, shared << 10, shared + 1 << 10, cluster),
        )
        for one in counts
    ]


def _no_target(what: str) -> HearthError:
    names = ", ".join(f"{major}.{minor}" for major, minor in sorted(_SHARED_KIB))
    text = f"{what}: give both, such as 8.6:82, with one of {names}"
    return HearthError("invalid_value", text, "compile_for")


def kernel_cache(
    folder: Path,
    deployment: DeploymentConfig,
    opening: Callable[[], CudaContext] = open_context,
    kernels: Path | None = None,
) -> KernelCache:
    """Count the compiled kernels of a base and draft for the first GPU, in `kernels` or the cache.

    Nothing is compiled. Raises `engine_incompatible` where there is no GPU, or one that the
    compiler does not know.
    """
    wanted = _programs(folder, deployment, [gpu_at_hand(opening)], kernels)
    return KernelCache(wanted=len(wanted), compiled=sum(one.is_there for one in wanted))


def compile_kernels(
    folder: Path,
    deployment: DeploymentConfig,
    targets: Sequence[Target],
    progress: Progress,
    kernels: Path | None = None,
) -> KernelCache:
    """Compile what is missing for these GPUs to where an executor looks for it; no GPU is needed.

    `compiled` counts those that are there in the end. `progress` is called with the number done and
    that of all. Raises `engine_incompatible` for a GPU that the compiler does not know, and
    `invalid_value` where the cache folder cannot be written.
    """
    wanted = _programs(folder, deployment, targets, kernels)
    missing = [one for one in wanted if not one.is_there]
    with ThreadPoolExecutor(compiler_threads()) as pool:
        for done, _ in enumerate(pool.map(_Program.make, missing), 1):
            progress("kernels", done, len(missing))
    if not all(one.is_there for one in missing):
        place = kernels or _place()
        text = f"the cache folder {place} cannot be written: set $HEARTH_CACHE to one that can"
        raise HearthError("invalid_value", text, "HEARTH_CACHE")
    return KernelCache(wanted=len(wanted), compiled=len(wanted))


class _Program(NamedTuple):
    """A source with its configuration, and the compiler of its GPU's architecture."""

    compiler: KernelCompiler
    file: str
    config: KernelConfig

    @property
    def is_there(self) -> bool:
        return self.compiler.has(self.file, kernel_source(self.file, self.config), ())

    def make(self) -> bytes:
        return self.compiler.compile(self.file, kernel_source(self.file, self.config), ())


def _place() -> Path:
    return cache_folder() / "kernels"


def _programs(
    folder: Path,
    deployment: DeploymentConfig,
    targets: Sequence[Target],
    kernels: Path | None,
) -> list[_Program]:
    """Programs of all targets, each once."""
    engines: list[tuple[Path, LLMEngineRunnerConfig, bool]] = [(folder, deployment.base, False)]
    if deployment.draft is not None:
        engines.append((folder / DRAFT_FOLDER, deployment.draft, True))
    api, wanted = load_compiler_api(), dict[tuple[str, str, KernelConfig], None]()
    for place, config, drafts in engines:
        build = build_registry_for_spec_decode_draft if drafts else build_registry_for_llm
        registry, layout = build(config), load_layout(place)
        weights = ExternalWeightManager.open(place, config)
        for spec in () if weights is None else weights.specs:
            registry.add_own(spec)
        for architecture, facts in targets:
            for one in wanted_kernels(config, layout, registry, facts):
                wanted[architecture, one.file, one.config] = None
    names = {architecture for architecture, *_ in wanted}
    compilers = {name: KernelCompiler(api, name, kernels or _place()) for name in names}
    return [_Program(compilers[name], file, config) for name, file, config in wanted]
