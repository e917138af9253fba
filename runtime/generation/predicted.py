"""Memory by part that engines will need: what is allocated is measured, the rest is estimated.

The constructors that `assemble` runs are run on a device that only counts. Estimates are contexts
and processes, libraries, weights that an engine reads itself, scratch memory, captured graphs,
records of pages, and adapters on the CPU.
"""

from collections import Counter
from typing import NamedTuple

from hearth.runtime.device.measuring import MeasuringDevice
from hearth.runtime.device.open import measuring_device
from hearth.runtime.generation.assembly import draft_zeros, open_sampler
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.kv_cache.page_pool import PagePool, record_bytes
from hearth.runtime.memory.estimates import (
    LOADING,
    TOWER_HOST_PARTS,
    adapter_bytes,
    estimate_draft,
    estimate_engine,
    estimate_host,
    estimate_tower,
)
from hearth.runtime.runner.engine_tables import assume_shapes
from hearth.runtime.runner.pipeline_io import DraftIO, PipelineIO
from hearth.runtime.runner.shared_resources import SharedResources, zero_bytes
from hearth.runtime.tensors.registry import tower_dims
from hearth.runtime.vision.vision_runner import allocate_tower_buffers
from hearth.runtime.vision_config import VisionConfig

_PARTS = (
    *("context", "process", "daemon_process", "library", "weights", "embedding", "kv_cache"),
    "rope",
    *("step_buffers", "zeros", "sampler", "engine_scratch", "prompt_graphs"),
    *("attention_scratch", "activations"),
    *("draft_library", "draft_weights", "draft_kv_cache", "draft_rope", "draft_buffers"),
    *("draft_zeros", "draft_scratch", "prefix_cache", "adapters"),
    *("vision_processes", "vision_library", "vision_weights", "vision_buffers", "vision_scratch"),
)


class PredictedMemory(NamedTuple):
    """Bytes by part."""

    device: dict[str, int]
    """In the memory of the engines' device.

    On the CPU the embedding table is mapped from its file and counted whole, though only the rows
    of tokens that occur become resident. On a GPU it lies beside the weights, and a tied head of an
    engine that owns its weights is a second copy.
    """
    host: dict[str, int]
    """In the host's memory beside a GPU; none on the CPU.

    Opening an engine reads its weights through the host: they are counted as if all were there at
    once, though most of it are pages of the file that the system can drop.
    """


def predict_memory(deployment: DeploymentConfig) -> PredictedMemory:
    """Bytes that the engines of `deployment` will need with all rows full."""
    config, draft, tower = deployment.base, deployment.draft, deployment.tower
    device = measuring_device(config.device)
    resources = build_measured(deployment, device)
    device.begin("step_buffers")
    found = Counter(estimate_engine(config))
    found.update(device.parts())
    if draft is not None:
        found.update(estimate_draft(draft, deployment.drafting))
    _split_zeros(found, deployment)
    if resources.lora is not None and resources.lora.rebinds:
        found["adapters"] += adapter_bytes(config, deployment.adapters)
    if tower is not None:
        found.update(estimate_tower(tower, _most_patches(tower, deployment.capacity)))
    if config.plan is not None:
        _share_scratch(found)
    beside = Counter[str]()
    if config.device == "cuda":
        beside.update(estimate_host(config, found["weights"]))
        if draft is not None:
            beside[f"draft_{LOADING}"] = found["draft_weights"]
        if tower is not None:
            beside.update(TOWER_HOST_PARTS)
    if deployment.prefix.device:
        # On the CPU all of it is the same memory.
        pages = beside if config.device == "cuda" else found
        pages["prefix_cache"] += device.host_bytes + record_bytes(deployment.prefix)
    return PredictedMemory({name: found[name] for name in _PARTS if name in found}, dict(beside))


def build_measured(deployment: DeploymentConfig, device: MeasuringDevice) -> SharedResources:
    """Build what `assemble` does, without its engines."""
    config, draft, tower = deployment.base, deployment.draft, deployment.tower
    engines = [config] if draft is None else [config, draft]
    shapes = deployment.shapes or [assume_shapes(one) for one in engines]
    device.begin("step_buffers")
    resources = SharedResources.create(config, shapes[0], device, zeros=draft_zeros(deployment))
    device.begin("weights")
    device.constants(shapes[0].weights)
    if draft is not None:
        device.begin("draft_buffers", "draft_")
        resources.add_draft_tables(draft, shapes[1], device)
        device.begin("draft_weights")
        device.constants(shapes[1].weights)
    device.begin("step_buffers")
    io = PipelineIO.create_for_llm(config, resources, device)
    device.begin("sampler")
    open_sampler(deployment, io, device)
    if draft is not None:
        device.begin("draft_buffers")
        DraftIO.create_for_spec_decode_draft(draft, deployment.drafting, resources, device)
    if tower is not None:
        patches = _most_patches(tower, deployment.capacity)
        largest = tower.max_patches if config.device == "cuda" else patches
        device.begin("vision_buffers")
        allocate_tower_buffers(tower, tower_dims(tower, largest), device)
    if deployment.prefix.device:
        device.begin("prefix_cache")
        PagePool(device, resources.cache_managers, deployment.prefix)
    if resources.lora is not None:
        for _ in deployment.adapters:
            resources.lora.reserve()
    return resources


def _most_patches(tower: VisionConfig, capacity: int) -> int:
    """Patches of the largest picture: half of a row's tokens, by default."""
    return min(tower.max_patches, max(1, capacity // 2) * tower.merge_size**2)


def _split_zeros(found: Counter[str], deployment: DeploymentConfig) -> None:
    """Split the buffer of zeros into the base's share and what a draft needs beyond it."""
    zeros, rows = found.pop("zeros"), deployment.base.max_supported_batch_size
    own = min(zeros, zero_bytes(deployment.base, rows))
    if own:
        found["zeros"] = own
    rest = "step_buffers" if deployment.draft is None else "draft_zeros"
    found[rest] += zeros - own


def _share_scratch(found: Counter[str]) -> None:
    """Let the steps of all plans share one context memory."""
    shared = found["engine_scratch"]
    for name in ("draft_scratch", "vision_scratch"):
        if name in found:
            found[name] = max(0, found[name] - shared)
            shared += found[name]
