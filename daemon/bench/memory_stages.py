"""An engine put together part by part, so that somebody can look at the memory in between."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtime.config import LLMEngineRunnerConfig, load_config
from runtime.decoding.options import RuntimeOptions, effective_config
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.device.device import SamplerBuffers
from runtime.device.open import open_device
from runtime.engine_runner import LLMEngineRunner
from runtime.executor.engine import EngineOptions
from runtime.executor.engine_executor import EngineExecutor
from runtime.pipeline_io import PipelineIO
from runtime.request import RowRequest
from runtime.shared_resources import SharedResources

STAGES: dict[str, tuple[str, ...]] = {
    "context": ("context", "process"),
    "tables and caches": ("embedding", "rope", "kv_cache"),
    "step buffers": ("step_buffers",),
    "engine": ("weights", "library"),
    "sampler": ("sampler",),
    "steps": ("engine_scratch", "attention_scratch", "activations"),
}
"""What is built, in order, and the parts of `predict_memory` that it must fit."""


def build_in_stages(folder: Path, built: Callable[[str], None]) -> None:
    """Open the engine folder as the runtime does, and run the largest steps; tell each stage.

    Raises what opening raises.
    """
    config = effective_config(load_config(folder), RuntimeOptions())
    device = open_device(config.device)
    built("context")
    resources = SharedResources.create_for_llm(config, folder, device)
    built("tables and caches")
    io = PipelineIO.create_for_llm(config, device)
    built("step buffers")
    executor = EngineExecutor.create_for_llm(folder, config, EngineOptions(), device)
    built("engine")
    lengths = resources.cache_managers[0].lengths
    sampler = device.batch_sampler(SamplerBuffers(io.output_logits, lengths, io.next_tokens))
    built("sampler")
    runner = LLMEngineRunner(config, executor, io, resources, device)
    runtime = LLMInferenceRuntime(runner, device, sampler)
    runtime.capture(range(1, runtime.max_batch + 1))
    _largest_steps(runtime, config)
    built("steps")
    runtime.close()


def _largest_steps(runtime: LLMInferenceRuntime, config: LLMEngineRunnerConfig) -> None:
    # Prompts as long as the engine takes them: the caches are written to their end.
    length = config.max_supported_input_length
    ids = [int(token) for token in np.random.default_rng(0).integers(3, config.vocab_size, length)]
    row = RowRequest(token_ids=ids, prompt_length=length, max_tokens=1, ignore_eos=True)
    runtime.begin([row] * runtime.max_batch)
    while runtime.active:
        runtime.step()
    runtime.end()
