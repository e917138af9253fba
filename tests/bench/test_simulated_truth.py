from contextlib import closing
from pathlib import Path

from bench.simulated_truth import simulated_stream
from runtime.config import load_config
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.options import RuntimeOptions
from runtime.request import GenerationRequest, RequestOptions, RowRequest


def test_the_truth_is_what_the_simulated_engine_says(toy: Path) -> None:
    prompts = [[5, 9, 300], [258], [17] * 40]
    rows = [
        RowRequest(
            token_ids=list(ids),
            prompt_length=len(ids),
            options=RequestOptions(max_tokens=50, ignore_eos=True),
        )
        for ids in prompts
    ]
    with closing(LLMInferenceRuntime.open(toy, RuntimeOptions(engine_kind="simulated"))) as runtime:
        said = runtime.handle_request(GenerationRequest(rows=rows)).rows
    config = load_config(toy)
    for row, prompt in zip(said, prompts, strict=True):
        assert row.token_ids == simulated_stream(config, prompt, 50)
        assert len(set(row.token_ids)) > 25
