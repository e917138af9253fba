"""How deep a step is: what lies between the executor's loop and the engine's launch."""

import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from onnxruntime import InferenceSession

from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest
from tests.actors.executor_house import open_house
from tests.references import reference_folder
from tools.hops import Call, frames_from_loop


def test_a_step_is_six_frames_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(reference_folder("qwen3"), tmp_path / "engine", ExportOptions())
    options = RuntimeOptions(speculation=SpeculationOptions(method="lookup", adaptive=False))
    runtime = LLMInferenceRuntime.open(tmp_path / "engine", options)
    runtime.capture([1])
    stacks: list[list[Call]] = []
    launch = InferenceSession.run_with_iobinding

    def note(session: InferenceSession, *given: Any) -> None:
        stacks.append(frames_from_loop(sys._getframe(1)))
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
        found = [stack for stack in stacks if any(call.function == step for call in stack)]
        assert found
        for stack in found:
            assert len(stack) <= 6
            assert len({call.file for call in stack}) <= 6
    runtime.close()
