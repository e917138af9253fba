from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from runtime.config import LLMEngineRunnerConfig
from runtime.decoding.deployment import DeploymentConfig, resolve_deployment, suited_drafting
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.errors import HearthError
from runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from runtime.request import GenerationRequest, RowRequest, SamplingParams
from tests.runtime.engine_configs import draft_config, small_config
from tests.runtime.export.trees import export_with_draft

BASE = structs.replace(
    small_config(),
    device="cuda",
    enable_eagle_spec_decode=True,
    eagle_layers=(0, 1, 2),
    output_hidden_dim=48,
    max_verify_tree_size=60,
)
DRAFT = structs.replace(draft_config(small_config()), device="cuda")
CHAIN = EagleDraftingConfig(drafting_top_k=1, drafting_step=4, verify_tree_size=5)


def causal(config: LLMEngineRunnerConfig) -> LLMEngineRunnerConfig:
    return structs.replace(config, chains_only=True)


def resolve(
    base: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig, eagle: EagleDraftingConfig | None
) -> DeploymentConfig:
    speculation = SpeculationOptions(method="eagle", eagle=eagle)
    return resolve_deployment(base, draft, RuntimeOptions(speculation=speculation))


@pytest.mark.parametrize(
    ("base", "draft", "shape"),
    [
        (BASE, DRAFT, (4, 3, 16)),
        (causal(BASE), causal(DRAFT), (1, 6, 7)),
        (causal(BASE), DRAFT, (1, 6, 7)),
        (structs.replace(BASE, device="cpu"), DRAFT, (1, 6, 7)),
        (structs.replace(BASE, max_verify_tree_size=9), DRAFT, (4, 3, 9)),
        (causal(BASE), structs.replace(DRAFT, max_draft_tree_size=3), (1, 3, 7)),
        (
            structs.replace(BASE, max_verify_tree_size=12),
            structs.replace(DRAFT, static_decode_batches=(1,), static_drafting=(2, 5)),
            (2, 5, 12),
        ),
    ],
)
def test_trees_suit_the_engines(
    base: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig, shape: tuple[int, int, int]
) -> None:
    found = suited_drafting(base, draft)
    assert (found.drafting_top_k, found.drafting_step, found.verify_tree_size) == shape


@pytest.mark.parametrize(
    ("base", "draft"), [(causal(BASE), causal(DRAFT)), (causal(BASE), DRAFT)], ids=["both", "base"]
)
def test_an_engine_of_chains_refuses_trees_by_name(
    base: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig
) -> None:
    tree = structs.replace(CHAIN, drafting_top_k=2)
    with pytest.raises(HearthError, match="--verify trees") as caught:
        resolve(base, draft, tree)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "drafting_top_k")
    assert resolve(base, draft, CHAIN).drafting == CHAIN
    assert resolve(BASE, DRAFT, tree).drafting == tree


@pytest.mark.parametrize(
    ("eagle", "field"),
    [
        (structs.replace(CHAIN, drafting_step=30, verify_tree_size=31), "verify_tree_size"),
        (structs.replace(CHAIN, drafting_top_k=8), "drafting_top_k"),
    ],
)
def test_trees_beyond_the_engines_are_refused_by_name(
    eagle: EagleDraftingConfig, field: str
) -> None:
    base = structs.replace(BASE, max_verify_tree_size=20)
    draft = structs.replace(DRAFT, max_draft_tree_size=30)
    with pytest.raises(HearthError) as caught:
        resolve(base, draft, eagle)
    assert (caught.value.code, caught.value.field) == ("invalid_value", field)


def test_an_engine_of_chains_gives_the_text_of_plain_decoding(tmp_path: Path, dialect: str) -> None:
    folder = export_with_draft("qwen3", tmp_path, verify="chains", dialect=dialect)
    answers = []
    for method in ("off", "eagle", "lookup"):
        speculation = SpeculationOptions(method=method, adaptive=False)
        options = RuntimeOptions(speculation=speculation)
        with closing(LLMInferenceRuntime.open(folder, options)) as runtime:
            rows = [
                RowRequest(
                    token_ids=[3 + row, 9, 4, 9, 4],
                    prompt_length=5,
                    max_tokens=20 + row,
                    sampling=SamplingParams(temperature=0),
                    ignore_eos=True,
                )
                for row in range(3)
            ]
            found = runtime.handle_request(GenerationRequest(rows=rows))
            answers.append([row.token_ids for row in found.rows])
            assert (runtime.speculation_metrics.rounds > 0) == (method != "off")
    assert answers[0] == answers[1] == answers[2]
