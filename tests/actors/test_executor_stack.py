"""How deep a step is: what lies between the executor's loop and the engine's launch."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from msgspec import structs
from onnxruntime import InferenceSession

from actors.executor import ExecutorActor
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.export import ExportOptions, export_model
from runtime.options import RuntimeOptions, SpeculationOptions
from runtime.request import RequestOptions, RowRequest
from tests.actors.executor_house import open_house
from tests.references import reference_folder

ROOT = Path(__file__).parents[2]


def ours(top: FrameType) -> list[tuple[str, str]]:
    """File and function of our own frames from the executor's loop to `top`, the loop first."""
    found: list[tuple[str, str]] = []
    frame: FrameType | None = top
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith((f"{ROOT}/actors/", f"{ROOT}/runtime/")):
            found.append((name, frame.f_code.co_name))
        if frame.f_code is ExecutorActor.run.__code__:
            return found[::-1]
        frame = frame.f_back
    return []


def test_a_step_is_seven_frames_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(reference_folder("qwen3"), tmp_path / "engine", ExportOptions())
    options = RuntimeOptions(speculation=SpeculationOptions(method="lookup", adaptive=False))
    runtime = LLMInferenceRuntime.open(tmp_path / "engine", options)
    runtime.capture([1])
    stacks: list[list[tuple[str, str]]] = []
    launch = InferenceSession.run_with_iobinding

    def note(session: InferenceSession, *given: Any) -> None:
        stacks.append(ours(sys._getframe(1)))
        launch(session, *given)

    monkeypatch.setattr(InferenceSession, "run_with_iobinding", note)
    # Rows that say one token again and again are what a lookup continues.
    again = RequestOptions(max_tokens=4, logit_bias=((5, 100.0),))
    with open_house(runtime) as house:
        for number, speculation in enumerate((False, True), 1):
            asked = structs.replace(again, speculation=speculation)
            request = RowRequest(token_ids=[5] * 9, prompt_length=9, options=asked)
            house.offer((number, request))
            if number == 1:
                house.start()
            house.finish(number)
    steps = ("execute_vanilla_decoding_step", "execute_eagle_base_tree_decoding_step")
    for step in steps:
        found = [stack for stack in stacks if any(name == step for _, name in stack)]
        assert found
        for stack in found:
            assert len(stack) <= 7
            assert len({file for file, _ in stack}) <= 6
    runtime.close()
