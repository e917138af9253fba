"""What the daemon would use, found out without loading the engine."""

from pathlib import Path

import msgspec
import onnxruntime

from daemon.budget import Budget, budget_of
from daemon.configuration.settings import Settings
from daemon.wiring import runtime_options
from runtime.config import LLMEngineRunnerConfig, load_config
from runtime.decoding.options import effective_config
from runtime.engine_folder import verify_folder
from runtime.errors import HearthError
from runtime.executor.onnx_engine import check_version
from runtime.executor.threads import physical_cores


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What would be used; memory in bytes, lengths in tokens. `reason` says why it cannot be."""

    ok: bool
    reason: str | None
    engine: str
    device: str
    engine_kind: str
    onnxruntime: str
    architecture: str
    dialect: str
    dtype: str
    kv_cache_dtype: str
    quantization: str
    max_batch: int
    capacity: int
    max_prompt_tokens: int
    threads: int
    memory: dict[str, int]
    memory_needed: int
    memory_available: int


def inspect_engine(settings: Settings, folder: Path) -> Report:
    """Check folder, versions and memory; raises HearthError where nothing can be reported."""
    stored = load_config(folder)
    verify_folder(folder, stored, digests=settings.verify)
    config = effective_config(stored, runtime_options(settings))
    budget = budget_of(config)
    reason = _refusal(config, budget)
    return Report(
        ok=reason is None,
        reason=reason,
        engine=str(folder),
        device="cpu",
        engine_kind=config.backend,
        onnxruntime=onnxruntime.__version__,
        architecture=config.architecture,
        dialect=config.dialect,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.weight_quantization,
        max_batch=config.max_supported_batch_size,
        capacity=config.max_kv_cache_capacity,
        max_prompt_tokens=config.max_supported_input_length,
        threads=settings.threads or physical_cores(),
        memory=budget.parts,
        memory_needed=budget.needed,
        memory_available=budget.available,
    )


def _refusal(config: LLMEngineRunnerConfig, budget: Budget) -> str | None:
    try:
        if config.backend == "onnxruntime":
            check_version(config.dialect, onnxruntime.__version__)
        budget.check()
    except HearthError as error:
        return error.message
    return None
