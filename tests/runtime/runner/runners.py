"""Runners as a deployment makes them, without one."""

from pathlib import Path

from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device
from runtime.executor.engine import EngineOptions
from runtime.executor.engine_executor import EngineExecutor
from runtime.runner.engine_runner import LLMEngineRunner
from runtime.runner.pipeline_io import PipelineIO
from runtime.runner.shared_resources import SharedResources


def open_runner(folder: Path, config: LLMEngineRunnerConfig, device: Device) -> LLMEngineRunner:
    """A runner of the engine in `folder`."""
    resources = SharedResources.create_for_llm(config, folder, device)
    return LLMEngineRunner(
        config,
        EngineExecutor.create_for_llm(folder, config, EngineOptions(threads=1), device),
        PipelineIO.create_for_llm(config, resources, device),
        resources,
        device,
    )
