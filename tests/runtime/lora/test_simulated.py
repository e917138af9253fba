from contextlib import closing
from pathlib import Path

import pytest

from hearth.bench.load_clients import simulated_stream
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.lora.adapter import simulated_shift
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest

REFERENCE = Path(__file__).parents[2] / "references" / "qwen3"


def test_tokens_follow_from_the_adapter_that_is_bound(tmp_path: Path) -> None:
    options = ExportOptions(capacity=64, max_batch=2, max_lora_rank=2)
    export_model(REFERENCE, tmp_path / "engine", options)
    simulated = RuntimeOptions(engine_kind="simulated")
    with closing(LLMInferenceRuntime.open(tmp_path / "engine", simulated)) as runtime:
        for name in ("a", "b"):
            # Nothing is read of an adapter but its name.
            runtime.load_adapter(name, tmp_path)
        for name in ("", "a", "b", "a", ""):
            asked = RequestOptions(max_tokens=5, adapter=name)
            row = RowRequest(token_ids=[3, 4], prompt_length=2, options=asked)
            given = runtime.handle_request(GenerationRequest(rows=[row])).rows[0].token_ids
            assert given == simulated_stream(runtime.config, [3, 4], 5, name)
        with pytest.raises(HearthError) as caught:
            runtime.switch_adapter("c")
        assert caught.value.code == "adapter_unknown"


def test_names_differ_and_none_is_nothing() -> None:
    assert simulated_shift("") == 0
    assert len({simulated_shift(name) for name in ("", "a", "b", "adapter-0", "adapter-1")}) == 5
