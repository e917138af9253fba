"""docs/seeds.md has every name of the seeds' speculation, and names what is there."""

from pathlib import Path

import pytest

from runtime.decoding import assembly, deployment
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.drafting import metrics
from runtime.drafting.draft_runner import EagleDraftRunner
from runtime.executor.engine_executor import EngineExecutor
from runtime.options import EagleDraftingConfig
from runtime.rows import DecodingInferenceContext, DecodingRow
from runtime.steps.engine_runner import LLMEngineRunner
from runtime.steps.pipeline_io import DraftIO, PipelineIO
from runtime.steps.shared_resources import SharedResources
from runtime.tensors import registry

ROOT = Path(__file__).parent.parent
CONTEXT = (
    "systemPrompts rawBatchedInputIds tokenIds currentGenerateLengths promptLengths "
    "finishedStates actualIterations packedInputLength evictedTokenIds evictedGenerateLengths "
    "evictedActualIterations evictedSystemPrompts evictedRawBatchedInputIds evictedPromptLengths "
    "batchIndexMapping multimodalEmbeddings extraInputTensors generationRound maxGenerateLength "
    "activeBatchSize originalBatchSize genAndSaveSystemCacheIndex stream initialize"
)
RUNTIME = (
    "LLMInferenceSpecDecodeRuntime captureDraftProposalCudaGraph "
    "captureDraftAcceptDecodeTokenCudaGraph captureBaseVerificationCudaGraph handleRequest "
    "getPrefillMetrics getEagleGenerationMetrics getMultimodalMetrics SpecDecodeInferenceContext "
    "EagleDraftingConfig draftingTopK draftingStep verifyTreeSize DeploymentConfig"
)
PARTS = (
    "createForSpecDecodeDraft buildRegistryForSpecDecodeDraft executeEagleBaseTreeDecodingStep "
    "captureEagleBaseTreeDecodingCudaGraph enableEagleSpecDecode outputHiddenDim "
    "maxVerifyTreeSize baseHiddenStates draftHiddenStatesIn draftHiddenStatesOut "
    "packedAttentionMask specDecodePositionIds createForSpecDecode allocateSpecDecodeHiddenStates "
    "buildTensorMapForSpecDecodeDraft"
)
ELSEWHERE = ("(vision)", "(prefix reuse)")
"""Why a member of the speculative runtime may be missing: it belongs to another step."""
HERE = (
    (EagleDraftRunner, "capture_draft_proposal_graph capture_draft_accept_graph"),
    (LLMEngineRunner, "execute_eagle_base_tree_decoding_step commit_path"),
    (LLMEngineRunner, "capture_eagle_base_tree_decoding_graph"),
    (LLMInferenceRuntime, "handle_request speculation_metrics capture"),
    (metrics, "EagleGenerationMetrics"),
    (DecodingInferenceContext, "evict"),
    (DecodingRow, "token_ids initial prompt_length generated state index"),
    (EagleDraftingConfig, "drafting_top_k drafting_step verify_tree_size"),
    (EngineExecutor, "create_for_spec_decode_draft"),
    (PipelineIO, "trees"),
    (DraftIO, "create_for_spec_decode_draft proposal"),
    (SharedResources, "add_draft"),
    (registry, "build_registry_for_spec_decode_draft"),
    (deployment, "load_deployment DeploymentConfig"),
    (assembly, "assemble"),
)


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "seeds.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return [row for row in cells if len(row) == 2]


@pytest.mark.parametrize("name", f"{CONTEXT} {RUNTIME} {PARTS}".split())
def test_every_name_has_a_row_that_says_where_it_is_or_why_not(
    name: str, rows: list[list[str]]
) -> None:
    found = [here for seed, here in rows if f"`{name}`" in seed or f"`{name}(" in seed]
    assert any(found)
    for here in found:
        assert "not served" not in here or any(reason in here for reason in ELSEWHERE)


@pytest.mark.parametrize(("owner", "names"), HERE)
def test_what_the_rows_name_is_there(owner: object, names: str, rows: list[list[str]]) -> None:
    text = " ".join(here for _, here in rows)
    for name in names.split():
        known = hasattr(owner, name) or name in getattr(owner, "__annotations__", {})
        assert known
        assert name in text
