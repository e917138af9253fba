"""An engine whose weights lie outside of its graph, and which takes adapters."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from tests.low_rank_models import merge, random_adapter
from tests.peft_models import write_peft
from tests.references import reference_folder
from tests.runtime.weights.external_models import export

PROMPT = [3, 14, 15, 92, 6, 5, 35]


def test_an_adapter_is_added_to_external_weights(tmp_path: Path, dialect: str) -> None:
    base = reference_folder("qwen3")
    write_peft(base, tmp_path / "adapter", rank=8)
    merge(base, tmp_path / "merged", random_adapter(base, 8))
    engine = export(base, tmp_path / "engine", dialect=dialect, max_lora_rank=8)
    plain = export(tmp_path / "merged", tmp_path / "other", dialect=dialect)
    tokens, logprobs = _answer(engine, tmp_path / "adapter")
    wanted, expected = _answer(plain)
    assert tokens == wanted != _answer(engine)[0]
    assert np.allclose(logprobs, expected, atol=1e-4)


def _answer(folder: Path, adapter: Path | None = None) -> tuple[list[int], Any]:
    with closing(LLMInferenceRuntime.open(folder, RuntimeOptions(threads=1))) as runtime:
        if adapter is not None:
            runtime.load_adapter("own", adapter)
        name = "" if adapter is None else "own"
        options = RequestOptions(max_tokens=12, ignore_eos=True, adapter=name, logprobs=0)
        row = RowRequest(token_ids=PROMPT, prompt_length=len(PROMPT), options=options)
        response = runtime.handle_request(GenerationRequest(rows=[row])).rows[0]
        return response.token_ids, response.logprobs
