"""Which kernels of an engine lie compiled in the cache folder; nothing is compiled or loaded."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from runtime.cache_folder import cache_folder
from runtime.decoding.deployment import DeploymentConfig
from runtime.device.cuda.compiler import KernelCompiler, kernel_source, load_compiler_api
from runtime.device.cuda.context import CudaContext, open_context
from runtime.engine_folder import DRAFT_FOLDER
from runtime.executor.kernels.engine import wanted_kernels
from runtime.executor.kernels.launch import SOURCES, GpuFacts
from runtime.tensors.registry import build_registry_for_llm, build_registry_for_spec_decode_draft
from runtime.weights.external_weight_manager import ExternalWeightManager
from runtime.weights.layout import load_layout


class KernelCache(msgspec.Struct, frozen=True, kw_only=True):
    """Programs of kernels that an engine wants when it is opened, and those that are there."""

    wanted: int
    compiled: int


def kernel_cache(
    folder: Path,
    deployment: DeploymentConfig,
    opening: Callable[[], CudaContext] = open_context,
    kernels: Path | None = None,
) -> KernelCache:
    """Look for those of a base and its draft on the first GPU, in `kernels` or where all lie.

    Raises `engine_incompatible` where there is no GPU, or one that the compiler does not know.
    """
    context = opening()
    try:
        facts, architecture = GpuFacts.of(context), context.properties.architecture
    finally:
        context.close()
    base, draft = deployment.base, deployment.draft
    engines = [(folder, base, build_registry_for_llm(base))]
    if draft is not None:
        registry = build_registry_for_spec_decode_draft(draft)
        engines.append((folder / DRAFT_FOLDER, draft, registry))
    wanted = {}
    for place, config, registry in engines:
        weights = ExternalWeightManager.open(place, config)
        for spec in () if weights is None else weights.specs:
            registry.add_own(spec)
        for one in wanted_kernels(config, load_layout(place), registry, facts):
            wanted[one.file, one.options] = kernel_source(one.file, SOURCES)
    folder = kernels or cache_folder() / "kernels"
    compiler = KernelCompiler(load_compiler_api(), architecture, folder)
    found = sum(compiler.has(file, source, given) for (file, given), source in wanted.items())
    return KernelCache(wanted=len(wanted), compiled=found)
