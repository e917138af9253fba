from msgspec import structs

from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import MOST_GPU_ROWS
from runtime.errors import HearthError
from runtime.executor.simulated_engine import as_simulated
from runtime.options import RuntimeOptions


def effective_config(
    stored: LLMEngineRunnerConfig, options: RuntimeOptions
) -> LLMEngineRunnerConfig:
    """The folder's configuration within the limits asked for.

    Raises `invalid_value` naming an option beyond the engine's own limit.
    """
    _check_options(options)
    config = _with_device(_with_backend(stored, options), options)
    batch = _limit("max_batch", options.max_batch, config.max_supported_batch_size)
    if config.device == "cuda":
        _check_rows(batch)
    _check_processor(options, config)
    capacity = _limit("capacity", options.capacity, config.max_kv_cache_capacity)
    if config.static_decode_batches:
        check_built("max_batch", batch, config.static_decode_batches)
        check_built("capacity", capacity, (config.max_kv_cache_capacity,))
    return structs.replace(
        config,
        max_supported_batch_size=batch,
        max_kv_cache_capacity=capacity,
        max_supported_input_length=min(config.max_supported_input_length, capacity - 1),
        prefill_chunk=min(config.prefill_chunk, capacity),
        max_verify_tree_size=min(config.max_verify_tree_size, capacity),
        # A proposal lies behind one entry at least.
        max_draft_tree_size=min(config.max_draft_tree_size, capacity - 1),
        static_decode_batches=tuple(one for one in config.static_decode_batches if one <= batch),
    )


def _with_backend(stored: LLMEngineRunnerConfig, options: RuntimeOptions) -> LLMEngineRunnerConfig:
    kind = stored.backend if options.engine_kind == "auto" else options.engine_kind
    if kind == "simulated":
        return as_simulated(
            stored, options.step_ms or stored.step_ms, options.prefill_us or stored.prefill_us
        )
    if kind != stored.backend:
        raise HearthError(
            "engine_incompatible",
            f"this folder holds an engine for {stored.backend}: export the model again for {kind}",
            "engine_kind",
        )
    for name in ("step_ms", "prefill_us"):
        if getattr(options, name):
            raise HearthError("unsupported_option", f"{name} needs the simulated engine", name)
    return stored


def _with_device(config: LLMEngineRunnerConfig, options: RuntimeOptions) -> LLMEngineRunnerConfig:
    if options.device in {"auto", config.device}:
        return config
    # A graph runs on both; the CPU has no operators in bfloat16.
    if config.backend == "onnxruntime" and config.dtype != "bfloat16":
        return structs.replace(config, device=options.device)
    raise HearthError(
        "engine_incompatible",
        f"this engine runs on {config.device} alone: export the model again for {options.device}",
        "device",
    )


def _check_options(options: RuntimeOptions) -> None:
    for name in ("threads", "max_batch", "capacity", "step_ms", "prefill_us"):
        if getattr(options, name) < 0:
            raise HearthError("invalid_value", f"{name} must not be negative", name)
    if not options.prefill_budget > 0:
        raise HearthError("invalid_value", "prefill_budget must be above 0", "prefill_budget")
    if options.capacity == 1:
        raise HearthError("invalid_value", "capacity must leave room for an answer", "capacity")


def _check_processor(options: RuntimeOptions, config: LLMEngineRunnerConfig) -> None:
    takes = config.backend == "onnxruntime"
    for name, honoured in (("threads", takes), ("spin", takes and config.device == "cpu")):
        if getattr(options, name) and not honoured:
            engine = f"{config.backend} on {config.device}"
            raise HearthError("unsupported_option", f"{name} is nothing to {engine}", name)


def check_built(name: str, asked: int | str, built: tuple[int | str, ...]) -> None:
    """A plan has the shapes that it was built with."""
    if asked not in built:
        raise HearthError(
            "invalid_value",
            f"{name} is {asked}, the plan was built for {', '.join(map(str, built))}",
            name,
        )


def _check_rows(batch: int) -> None:
    if batch > MOST_GPU_ROWS:
        raise HearthError(
            "invalid_value", f"max_batch is {batch}, a GPU serves {MOST_GPU_ROWS} rows", "max_batch"
        )


_EXPORTED_BY = {"capacity": "--capacity", "max_batch": "--max-batch"}


def _limit(name: str, asked: int, limit: int) -> int:
    if asked > limit:
        how = _EXPORTED_BY.get(name)
        more = f": export the model with {how} {asked}" if how else ""
        text = f"{name} is {asked}, the engine was built for {limit}{more}"
        raise HearthError("invalid_value", text, name)
    return asked or limit
