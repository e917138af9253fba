"""Breaks the CUDA context of an executor's process once, as a faulty kernel would."""

from pathlib import Path

import numpy as np

from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.tensors.tensor import Tensor

STEPS_BEFORE = 12
NOWHERE = 8
HOOK = """
import sys
if "hearth.actors.host" in sys.orig_argv:
    from pathlib import Path
    from tests.gpu.poison import install
    install(Path({marker!r}))
"""
"""A `sitecustomize.py` that poisons the executor which first sees that `marker` is absent."""


def install(marker: Path) -> None:
    """Let a step of this process write to an illegal address, unless `marker` exists."""
    if marker.exists():
        return
    step, steps = LLMInferenceRuntime.step, 0

    def poisoned(runtime: LLMInferenceRuntime) -> StepResult:
        nonlocal steps
        steps += 1
        if steps == STEPS_BEFORE:
            marker.touch()
            target = Tensor.on_device("nowhere", NOWHERE, (4,), np.dtype(np.int64), None)
            runtime._runner._ops.advance(target, 4)
        return step(runtime)

    LLMInferenceRuntime.step = poisoned  # type: ignore[assignment, method-assign] # a fault
