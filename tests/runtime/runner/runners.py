"""Runners as a deployment makes them, without one."""

from pathlib import Path

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Device
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.runner.engine_runner import LLMEngineRunner
from hearth.runtime.runner.pipeline_io import PipelineIO
from hearth.runtime.runner.shared_resources import SharedResources


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
