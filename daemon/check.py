"""What the daemon would use, found out without loading the engine."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from daemon.budget import Budget, budget_of, host_budget_of, predicted_parts
from daemon.configuration.settings import Settings
from daemon.gpu_facts import GPUFacts, check_gpu, gpu_facts, serving_library
from daemon.wiring import runtime_options
from runtime.config import PlanRecord
from runtime.decoding.deployment import DeploymentConfig, load_deployment
from runtime.errors import HearthError
from runtime.executor.threads import physical_cores


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What would be used; memory in bytes, lengths in tokens.

    `reason` says why it cannot be, `code` and `field` name that for programs. `memory` is that of
    the engine's device; an engine of a GPU needs `host_memory` beside it. `library` is empty where
    none serves the engine. `speculation` tells how several tokens a step are tried.
    """

    ok: bool
    reason: str | None
    code: str | None
    field: str | None
    engine: str
    device: str
    gpu: GPUFacts | None
    engine_kind: str
    library: str
    plan: PlanRecord | None
    architecture: str
    dialect: str
    dtype: str
    kv_cache_dtype: str
    quantization: str
    max_batch: int
    capacity: int
    max_prompt_tokens: int
    threads: int
    speculation: str
    memory: dict[str, int]
    memory_needed: int
    memory_available: int
    host_memory: dict[str, int]
    host_memory_needed: int
    host_memory_available: int


class _Found(msgspec.Struct):
    """What could be found out, and the first refusal."""

    gpu: GPUFacts | None = None
    library: str = ""
    budget: Budget = Budget({}, 0)
    host: Budget | None = None
    refusal: HearthError | None = None


def inspect_engine(settings: Settings, folder: Path) -> Report:
    """Check folder, versions and memory; raises HearthError where nothing can be reported."""
    deployment = load_deployment(folder, runtime_options(settings))
    found = _Found()
    # A missing library does not keep the GPU from being shown, nor the other way round.
    for look in (_look_at_library, _look_at_device, _compare):
        found.refusal = _refused(look, deployment, found) or found.refusal
    return _report(settings, folder, deployment, found)


def _refused(
    look: Callable[[DeploymentConfig, _Found], None],
    deployment: DeploymentConfig,
    found: _Found,
) -> HearthError | None:
    try:
        look(deployment, found)
    except HearthError as error:
        return found.refusal or error
    return None


def _look_at_library(deployment: DeploymentConfig, found: _Found) -> None:
    found.library = serving_library(deployment.base)


def _look_at_device(deployment: DeploymentConfig, found: _Found) -> None:
    # What is needed is told even where no GPU can be asked what is free.
    found.budget = Budget(predicted_parts(deployment), 0)
    found.host = host_budget_of(deployment)
    if deployment.base.device == "cuda":
        found.gpu = gpu_facts()
    found.budget = budget_of(deployment, found.gpu)


def _compare(deployment: DeploymentConfig, found: _Found) -> None:
    if found.refusal is not None:
        return
    config = deployment.base
    if found.gpu is not None:
        check_gpu(config, found.gpu, found.library)
    found.budget.check()
    if found.host is not None:
        found.host.check()


def _report(
    settings: Settings, folder: Path, deployment: DeploymentConfig, found: _Found
) -> Report:
    config = deployment.base
    refusal, host = found.refusal, found.host or Budget({}, 0)
    return Report(
        ok=refusal is None,
        reason=refusal.message if refusal else None,
        code=refusal.code if refusal else None,
        field=refusal.field if refusal else None,
        engine=str(folder),
        device=config.device,
        gpu=found.gpu,
        engine_kind=config.backend,
        library=found.library,
        plan=config.plan,
        architecture=config.architecture,
        dialect=config.dialect,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.weight_quantization,
        max_batch=config.max_supported_batch_size,
        capacity=config.max_kv_cache_capacity,
        max_prompt_tokens=config.max_supported_input_length,
        threads=settings.threads or (physical_cores() if config.device == "cpu" else 0),
        speculation=_speculation(deployment),
        memory=found.budget.parts,
        memory_needed=found.budget.needed,
        memory_available=found.budget.available,
        host_memory=host.parts,
        host_memory_needed=host.needed,
        host_memory_available=host.available,
    )


def _speculation(deployment: DeploymentConfig) -> str:
    if deployment.method == "eagle":
        tree = deployment.drafting
        shape = f"top-k {tree.drafting_top_k}, step {tree.drafting_step}"
        return f"eagle, {shape}, {tree.tree_size} nodes"
    if deployment.method == "lookup":
        return f"lookup, {deployment.speculation.lookup_tokens} tokens"
    return "off"
