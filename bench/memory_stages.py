"""An engine put together stage by stage, in a process of its own that is measured in between.

`python -m hearth.bench.memory_stages JOB` reports the name of each stage, and goes on at its
parent's next message.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from hearth.bench.batches import rows_of, run_batch
from hearth.bench.child_process import ParentProcess
from hearth.runtime.device.open import open_device
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.generation.assembly import assemble
from hearth.runtime.generation.deployment import DeploymentConfig, load_deployment
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.images import ImageLayout
from hearth.runtime.kv_cache.pages import PAGE_TOKENS
from hearth.runtime.onnx_runtime import load_onnx_runtime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions
from hearth.runtime.vision.vision_runner import VisionRunner

STAGES: dict[str, tuple[str, ...]] = {
    "context": ("context", "process"),
    "tables and caches": (
        "embedding",
        "rope",
        "kv_cache",
        "draft_rope",
        "draft_kv_cache",
        "zeros",
        "draft_zeros",
        "adapters",
    ),
    "step buffers": ("step_buffers",),
    "engine": ("weights", "library"),
    "sampler": ("sampler",),
    "draft": ("draft_library", "draft_weights", "draft_buffers"),
    "tower": ("vision_library", "vision_weights", "vision_buffers"),
    "prefix cache": ("prefix_cache",),
    "steps": (
        "engine_scratch",
        "attention_scratch",
        "activations",
        "draft_scratch",
        "vision_scratch",
        "prompt_graphs",
    ),
}
"""Steps of building, in order, and the parts of a deployment's prediction that it must fit."""
_ROUNDS_TOKENS = 24


class MemoryJob(msgspec.Struct, frozen=True):
    """The engine folder that is opened, and the bytes of its prefix cache; 0 for none."""

    engine: str
    prefix_cache_bytes: int = 0

    def load(self) -> DeploymentConfig:
        """Load it as a daemon does, with the draft if the folder holds one."""
        speculation = SpeculationOptions(method="auto")
        options = RuntimeOptions(
            verify=False, speculation=speculation, prefix_cache_bytes=self.prefix_cache_bytes
        )
        return load_deployment(Path(self.engine), options)


def build_in_stages(job: MemoryJob, built: Callable[[str], None]) -> None:
    """Open the engine folder as the runtime does, and run the largest steps; tell each stage.

    Raises the errors of opening.
    """
    deployment, folder = job.load(), Path(job.engine)
    device = open_device(deployment.base.device)
    if deployment.base.backend == "onnxruntime":
        # The library is part of the process, and not of its first engine.
        load_onnx_runtime()
    built("context")
    parts = assemble(deployment, folder, EngineOptions(), device, built=built)
    runtime = LLMInferenceRuntime(parts)
    runtime.capture(range(1, runtime.max_batch + 1))
    longest = min(runtime.config.max_supported_input_length, runtime.capacity - 1)
    _run(runtime, longest, 1)
    if deployment.draft is not None:
        # Rounds, with the caches nearly full.
        _run(runtime, max(1, longest - _ROUNDS_TOKENS), _ROUNDS_TOKENS)
    if runtime.tower is not None:
        _encode_largest(runtime.tower)
    # Memory and records of a page become resident when it is first written.
    batches = -(-deployment.prefix.device * PAGE_TOKENS // (longest * runtime.max_batch))
    for seed in range(1, batches + 1):
        _run(runtime, longest, 1, seed)
    built("steps")
    runtime.close()


def _run(runtime: LLMInferenceRuntime, length: int, tokens: int, seed: int = 0) -> None:
    sizes = (runtime.max_batch, length)
    prompts = np.random.default_rng(seed).integers(3, runtime.config.vocab_size, sizes)
    options = RequestOptions(max_tokens=tokens, ignore_eos=True)
    run_batch(runtime, rows_of(prompts.tolist(), options))


def _encode_largest(tower: VisionRunner) -> None:
    """Run the largest call of a vision tower."""
    config = tower.config
    tokens = config.max_patches // config.merge_size**2
    grid = (1, config.merge_size, tokens * config.merge_size)
    patches = np.zeros((config.max_patches, config.patch_bytes), np.uint8)
    tower.encode([(patches, ImageLayout(0, 0, grid, tokens))])


def main() -> None:
    """Serve as the child: build the engine of the job's folder, or refuse."""
    parent = ParentProcess()

    def tell(stage: str) -> None:
        parent.send(stage)
        parent.receive(str)

    tell("start")
    try:
        build_in_stages(parent.job(MemoryJob), tell)
    except HearthError as error:
        parent.refuse(error)


if __name__ == "__main__":
    main()
