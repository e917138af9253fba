from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cpu.cpu_device import cpu_instructions
from hearth.runtime.device.device import BatchSampler, Device, SamplerBuffers
from hearth.runtime.engine_folder import DRAFT_FOLDER
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.speculative import SpeculativeStrategy
from hearth.runtime.images import EmbeddingStore
from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES, DiskCache
from hearth.runtime.kv_cache.page_index import PageIndex
from hearth.runtime.kv_cache.page_loads import DiskTier, LoadCostModel, PageLoads
from hearth.runtime.kv_cache.page_pool import PagePool
from hearth.runtime.kv_cache.prefix_cache import PrefixCache, engine_digest, is_exact
from hearth.runtime.memory.sizes import projection_bytes
from hearth.runtime.runner.engine_runner import LLMEngineRunner
from hearth.runtime.runner.pipeline_io import PipelineIO, draft_zero_bytes
from hearth.runtime.runner.shared_resources import SharedResources
from hearth.runtime.speculation.draft_runner import EagleDraftRunner, grows_chains
from hearth.runtime.speculation.eagle import EagleProposer
from hearth.runtime.speculation.policy import SpeculationPolicy
from hearth.runtime.speculation.proposer import LookupProposer, Proposer
from hearth.runtime.undo import undoing
from hearth.runtime.vision.vision_runner import LocalEmbeddings, VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager

_WORTH_THREADS = 16 << 20
"""Bytes of weights from which more than one thread speeds up a draft's step."""


class RuntimeParts(NamedTuple):
    """Parts of a runtime."""

    runner: LLMEngineRunner
    device: Device
    sampler: BatchSampler
    speculation: SpeculativeStrategy | None
    tower: VisionRunner | None = None
    prefix: PrefixCache | None = None


def assemble(
    deployment: DeploymentConfig,
    folder: Path,
    options: EngineOptions,
    device: Device,
    *,
    built: Callable[[str], None] = lambda _: None,
    embeddings: EmbeddingStore | None = None,
) -> RuntimeParts:
    """Caches and buffers first, then the engines, of a folder that was checked before.

    `built` gets each stage; `embeddings` are where those of images lie. Raises `engine_*`,
    `out_of_memory` or `invalid_value`; engines that were opened by then are closed.
    """
    config, draft = deployment.base, deployment.draft
    resources = _resources(deployment, folder, device)
    built("tables and caches")
    io = PipelineIO.create_for_llm(config, resources, device)
    built("step buffers")
    with undoing() as undo:
        base = EngineExecutor.create_for_llm(
            folder, config, options, device, resources.external_weights
        )
        undo.callback(base.close)
        built("engine")
        sampler = open_sampler(deployment, io, device)
        built("sampler")
        store = (embeddings or LocalEmbeddings()) if config.image_token_id else None
        runner = LLMEngineRunner(config, base, io, resources, device, embeddings=store)
        executors, drafter = [base], None
        if draft is not None:
            weights = resources.draft_weights
            chains = grows_chains(draft, deployment.drafting)
            own = structs.replace(options, ranks_alone=chains)
            executors.append(_draft_executor(folder / DRAFT_FOLDER, draft, own, device, weights))
            undo.callback(executors[-1].close)
            drafter = EagleDraftRunner(
                draft,
                deployment.drafting,
                executors[-1],
                resources,
                device,
                trees=io.trees,
                embeddings=store,
            )
        built("draft")
        tower = None
        if deployment.tower is not None and device.kind == "cuda":
            tower = VisionRunner.open(folder / VISION_FOLDER, deployment.tower, options, device)
            undo.callback(tower.close)
            executors.append(tower.executor)
        built("tower")
        share_context_memory(executors, device)
        proposer = _proposer(deployment, drafter, io, device)
        speculation = None
        if proposer is not None:
            speculation = _speculation(deployment, runner, sampler, io, proposer)
        prefix = _prefix_cache(deployment, resources, device, runner, proposer)
        built("prefix cache")
        return RuntimeParts(runner, device, sampler, speculation, tower, prefix)


def _resources(deployment: DeploymentConfig, folder: Path, device: Device) -> SharedResources:
    config, draft, given = deployment.base, deployment.draft, deployment.weights
    zeros = draft_zeros(deployment)
    resources = SharedResources.create_for_llm(config, folder, device, given, zeros=zeros)
    if draft is not None:
        resources.add_draft(draft, folder / DRAFT_FOLDER, device)
    return resources


def draft_zeros(deployment: DeploymentConfig) -> int:
    """Bytes of the buffer of zeros that a draft reads."""
    draft, rows = deployment.draft, deployment.base.max_supported_batch_size
    return 0 if draft is None else draft_zero_bytes(draft, deployment.drafting, rows)


def open_sampler(deployment: DeploymentConfig, io: PipelineIO, device: Device) -> BatchSampler:
    """A sampler over the logits of a decoder's steps, and over the trees that it verifies."""
    inputs, trees = io.step.inputs, None if deployment.method == "off" else io.trees
    return device.batch_sampler(
        SamplerBuffers(io.step.logits, inputs.lengths, inputs.next_tokens, trees)
    )


def _speculation(
    deployment: DeploymentConfig,
    runner: LLMEngineRunner,
    sampler: BatchSampler,
    io: PipelineIO,
    proposer: Proposer,
) -> SpeculativeStrategy:
    adaptive, rows = deployment.speculation.adaptive, deployment.base.max_supported_batch_size
    policy = SpeculationPolicy(rows) if adaptive else None
    return SpeculativeStrategy(runner, sampler, io.trees, proposer, policy)


def _prefix_cache(
    deployment: DeploymentConfig,
    resources: SharedResources,
    device: Device,
    runner: LLMEngineRunner,
    proposer: Proposer | None,
) -> PrefixCache | None:
    """The prefix cache, if it can hold a page.

    Raises `out_of_memory`, and `invalid_value` for a folder that cannot be used.
    """
    config, tiers = deployment.base, deployment.prefix
    if not tiers.device:
        return None
    engines = [config] if deployment.draft is None else [config, deployment.draft]
    pool = PagePool(device, resources.cache_managers, tiers)
    engine = engine_digest(engines)
    disk = None
    if tiers.disk:
        most_bytes = tiers.disk * (HEAD_BYTES + pool.page_bytes)
        folder = Path(deployment.prefix_folder)
        disk = DiskTier(pool, DiskCache(folder, engine, pool.page_bytes, most_bytes))
    return PrefixCache(
        PageIndex(tiers),
        pool,
        engine,
        loads=PageLoads(pool, disk, LoadCostModel(), tiers.device),
        disk=disk,
        exact=is_exact(config, cpu_instructions()),
        digest_of=runner.get_lora_weights_digest,
        drafted=None if proposer is None else proposer.drafted,
    )


def share_context_memory(executors: Sequence[EngineExecutor], device: Device) -> None:
    """Give engines one scratch memory, as large as the one that wants most; before any capture.

    Their steps go to one stream, so that no two use it at a time. Raises `out_of_memory`.
    """
    needed = max(executor.required_context_memory() for executor in executors)
    if not needed:
        return
    memory = device.zeros("context_memory", (needed,), np.dtype(np.uint8))
    for executor in executors:
        executor.set_context_memory(memory)


def _proposer(
    deployment: DeploymentConfig,
    drafter: EagleDraftRunner | None,
    io: PipelineIO,
    device: Device,
) -> Proposer | None:
    if drafter is not None:
        return EagleProposer(drafter, io, deployment.drafting)
    if deployment.method == "off":
        return None
    return LookupProposer(
        device.tree_ops, deployment.speculation, fixed_width=device.kind == "cuda"
    )


def _draft_executor(
    folder: Path,
    draft: LLMEngineRunnerConfig,
    options: EngineOptions,
    device: Device,
    weights: ExternalWeightManager | None,
) -> EngineExecutor:
    """The draft's engine; one of few weights runs on the calling thread: waking others is slow."""
    if projection_bytes(draft) < _WORTH_THREADS:
        options = structs.replace(options, threads=1)
    return EngineExecutor.create_for_spec_decode_draft(folder, draft, options, device, weights)
