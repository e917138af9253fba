"""From settings to parts: what each actor and the front door is given; no I/O."""

import os
import sys
from pathlib import Path

import msgspec
from msgspec import structs

from actors.addresses import Addresses
from actors.admission import PolicySettings
from actors.messages import ExecutorLimits, ExecutorReady
from actors.roles import EncoderSettings, ExecutorSettings
from actors.supervisor_messages import ActorReady
from daemon.configuration.places import adapters_folder
from daemon.configuration.settings import Settings
from daemon.door.settings import DoorFacts, DoorSettings
from daemon.sight import Sight
from daemon.supervision.file_watch import WatchedFile
from daemon.supervision.restart_policy import Deadlines
from daemon.supervision.supervisor import ActorPlan
from runtime.cache_folder import cache_folder
from runtime.config import LLMEngineRunnerConfig
from runtime.errors import HearthError
from runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from runtime.version import VERSION

_ALWAYS = sys.maxsize
"""Restarts in a row."""


def runtime_options(settings: Settings) -> RuntimeOptions:
    """The part of the settings that the runtime takes."""
    return RuntimeOptions(
        threads=settings.threads,
        spin=settings.spin,
        max_batch=settings.max_batch,
        capacity=settings.capacity,
        verify=settings.verify,
        engine_kind="" if settings.engine_kind == "auto" else settings.engine_kind,
        device="" if settings.device == "auto" else settings.device,
        step_ms=settings.step_ms,
        prefill_us=settings.prefill_us,
        prefill_budget=settings.prefill_budget,
        image_memory=settings.images_in_flight_bytes + settings.image_cache_bytes,
        prefix_cache_bytes=settings.prefix_cache_bytes,
        prefix_host_bytes=settings.prefix_host_bytes,
        prefix_disk_bytes=settings.prefix_disk_bytes,
        prefix_folder=_prefix_folder(settings),
        adapters=str(adapters_folder(settings.adapters, os.environ)),
        weights=str(Path(settings.weights).absolute()) if settings.weights else "",
        speculation=speculation_options(settings),
    )


def _prefix_folder(settings: Settings) -> str:
    """Where pages of the prefix cache are spilled to; "" where none are."""
    for name in ("prefix_host_bytes", "prefix_disk_bytes"):
        if getattr(settings, name) and not settings.prefix_cache_bytes:
            raise HearthError(
                "invalid_value",
                f"{name} is for what finds no room in prefix_cache_bytes, which is 0",
                name,
            )
    if not settings.prefix_disk_bytes:
        return ""
    folder = Path(settings.prefix_folder or cache_folder() / "prefix")
    return str(folder.absolute())


def speculation_options(settings: Settings) -> SpeculationOptions:
    """How the runtime speculates; raises `invalid_value` for a tree that is given in part."""
    return SpeculationOptions(
        method=settings.speculation, eagle=_drafting(settings), lookup_tokens=settings.lookup_tokens
    )


def _drafting(settings: Settings) -> EagleDraftingConfig | None:
    names = ("drafting_top_k", "drafting_step", "verify_tree_size")
    missing = [name for name in names if not getattr(settings, name)]
    if len(missing) == len(names):
        return None
    if missing:
        raise HearthError(
            "invalid_value",
            f"{missing[0]} is not given: the draft's tree needs {', '.join(names)} together",
            missing[0],
        )
    return EagleDraftingConfig(
        drafting_top_k=settings.drafting_top_k,
        drafting_step=settings.drafting_step,
        verify_tree_size=settings.verify_tree_size,
    )


def door_settings(settings: Settings) -> DoorSettings:
    """The front door's limits."""
    return DoorSettings(
        socket=settings.socket,
        tcp_port=settings.tcp_port,
        clients=settings.clients,
        requests_per_client=settings.requests_per_client,
        lease_s=settings.lease_s,
        queued_requests=settings.queue_requests,
        queued_tokens=settings.queue_tokens,
        client_queue_share=settings.client_queue_share,
        memory_bytes=settings.client_memory_mb << 20,
        unread_bytes=settings.client_memory_mb << 18,
        images=settings.images_per_request,
        image_bytes=settings.image_bytes,
        request_image_bytes=settings.images_in_flight_bytes,
        image_tokens=settings.image_tokens,
    )


def within(config: LLMEngineRunnerConfig, limits: ExecutorLimits) -> LLMEngineRunnerConfig:
    """The configuration with the limits that an executor told."""
    return structs.replace(
        config,
        max_supported_batch_size=limits.max_batch,
        max_supported_input_length=limits.max_prompt_tokens,
        max_kv_cache_capacity=limits.max_total_tokens,
    )


def door_facts(
    settings: Settings,
    model: str,
    config: LLMEngineRunnerConfig,
    engine: dict[str, str | int | float],
) -> DoorFacts:
    """What clients are told; the longest prompt leaves room for one token of reply."""
    longest = min(config.max_supported_input_length, config.max_kv_cache_capacity - 1)
    return DoorFacts(
        server=f"hearth {VERSION}",
        model=model,
        prompt_tokens=min(longest, settings.queue_tokens),
        total_tokens=config.max_kv_cache_capacity,
        places=config.max_supported_batch_size,
        engine=engine,
    )


def policy_settings(settings: Settings) -> PolicySettings:
    """The scheduler's limits."""
    return PolicySettings(
        batching=settings.batching,
        fill_wait_s=settings.fill_wait_ms / 1000,
        hold_s=settings.hold_s,
        queue_requests=settings.queue_requests,
        queue_tokens=settings.queue_tokens,
        client_queue_share=settings.client_queue_share,
        ageing_s=settings.ageing_s,
        adapter_turn_s=settings.adapter_turn_ms / 1000,
    )


def executor_plan(
    settings: Settings,
    engine: Path,
    epoch: str = "",
    sight: Sight | None = None,
    files: tuple[WatchedFile, ...] = (),
    *,
    identity: str = "",
) -> ActorPlan:
    """The executor as its supervisor keeps it; its paths do not depend on the working folder."""
    given = ExecutorSettings(
        engine=str(engine.absolute()),
        options=runtime_options(settings),
        identity=identity,
        patches=sight and sight.patches.shared,
        embeddings=sight and sight.embeddings.shared,
    )
    return _plan("executor", given, settings, epoch, sight)._replace(files=files)


def encoder_plan(
    settings: Settings,
    engine: Path,
    epoch: str,
    sight: Sight,
    files: tuple[WatchedFile, ...] = (),
    *,
    identity: str = "",
) -> ActorPlan:
    """The encoder likewise; however often it is lost, requests of text alone go on."""
    given = EncoderSettings(
        engine=str(engine.absolute()),
        options=structs.replace(
            runtime_options(settings), threads=settings.encoder_threads, adapters=""
        ),
        identity=identity,
        pictures=sight.pictures.shared,
        patches=sight.patches.shared,
        embeddings=sight.embeddings.shared,
        nice=settings.encoder_nice,
        image_decode_timeout_s=settings.image_decode_timeout_s,
        image_decode_memory_bytes=settings.image_decode_memory_bytes,
    )
    plan = _plan("encoder", given, settings, epoch, sight)
    return plan._replace(restart_limit=_ALWAYS, files=files)


def _plan(
    role: str, given: msgspec.Struct, settings: Settings, epoch: str, sight: Sight | None
) -> ActorPlan:
    return ActorPlan(
        role,
        given,
        Deadlines(load_s=settings.load_timeout_s, progress_s=settings.progress_timeout_s),
        restart_limit=settings.restart_limit,
        log_level=settings.log_level,
        log_format=settings.log_format,
        epoch=epoch,
        descriptors=sight.descriptors if sight else (),
    )


def executor_ready(ready: ActorReady, addresses: Addresses) -> ExecutorReady:
    """What the scheduler is told of an executor that can work."""
    if ready.limits is None:
        raise HearthError("internal", "the executor did not tell its limits", "limits")
    return ExecutorReady(addresses.incarnation, addresses.work, addresses.control, ready.limits)


def metrics_info(model: str, config: LLMEngineRunnerConfig) -> dict[str, str]:
    """What the metrics say of build and model."""
    return {
        "version": VERSION,
        "model": model,
        "backend": config.backend,
        "device": config.device,
        "dtype": config.dtype,
        "quantization": config.weight_quantization,
    }
