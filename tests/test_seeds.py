"""docs/seeds.md has every name of the seeds, and what it says to stand here is here and works."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest

from runtime.config import LLMEngineRunnerConfig
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.drafting.eagle import EagleProposer
from runtime.errors import Code
from runtime.options import RuntimeOptions, SpeculationOptions
from runtime.request import GenerationRequest, RequestOptions, RowRequest
from runtime.tensors.dims import InferenceDims
from runtime.tensors.registry import (
    build_registry_for_llm,
    build_registry_for_spec_decode_draft,
)
from tests.runtime.export.trees import export_with_draft

ROOT = Path(__file__).parent.parent
EXECUTOR = (
    "EngineExecutor prepare execute captureGraph getRequiredContextMemorySize setContextMemory "
    "getNumIOTensors getIOTensorName getBindingDataType getProfileShape getEngine createForLLM "
    "createForSpecDecodeDraft BindingSnapshot.bindings operator=="
)
RUNNER = (
    "LLMEngineRunner DecodingGraphKey BaseGraphKey getRopeCosSinCacheTensor getLinearKVCache "
    "getEngineConfig setLMHeadWeights executePrefillStep executeVanillaDecodingStep "
    "executeEagleBaseTreeDecodingStep captureVanillaDecodingCudaGraph switchLoraWeights "
    "getActiveLoraWeightsName getAvailableLoraWeights captureEagleBaseTreeDecodingCudaGraph"
)
CONFIG = (
    "ropeConfig useContextDependentRope enableEagleSpecDecode useTrtNativeOps numDecoderLayers "
    "numKVHeads headDim rotaryDim maxSupportedBatchSize maxSupportedInputLength "
    "maxKVCacheCapacity vocabSize reducedVocabSize outputVocabSize maxSupportedLoraRank "
    "outputHiddenDim maxVerifyTreeSize numDeepstackFeatures audioTokenId imageTokenId "
    "numMambaLayers numAttentionLayers mambaNumHeads mambaHeadDim ssmStateSize convDim convKernel"
)
PIPELINE = (
    "inputsEmbeds outputLogits selectTokenIndices contextLengths hostContextLengths "
    "hostSelectTokenIndices deepstackEmbeds mropeCosSin baseHiddenStates draftHiddenStatesIn "
    "draftHiddenStatesOut outputHiddenStates prefillEmbedsBackup packedAttentionMask "
    "specDecodePositionIds createForLLM createForSpecDecode allocateBasicIO "
    "allocateDeepstackEmbeds allocateSpecDecodeHiddenStates allocateMRope buildTensorMap "
    "buildTensorMapForSpecDecodeDraft"
)
RESOURCES = (
    "SharedResources cacheManagers loraManager externalWeightManager kCacheViews "
    "createForSpecDecode allocateZeroBuffer"
)
RUNTIME = (
    "LLMInferenceSpecDecodeRuntime captureDraftProposalCudaGraph "
    "captureDraftAcceptDecodeTokenCudaGraph captureBaseVerificationCudaGraph handleRequest "
    "getPrefillMetrics getEagleGenerationMetrics getMultimodalMetrics SpecDecodeInferenceContext "
    "EagleDraftingConfig draftingTopK draftingStep verifyTreeSize DeploymentConfig"
)
CONTEXT = (
    "systemPrompts rawBatchedInputIds tokenIds currentGenerateLengths promptLengths "
    "finishedStates actualIterations packedInputLength evictedTokenIds evictedGenerateLengths "
    "evictedActualIterations evictedSystemPrompts evictedRawBatchedInputIds evictedPromptLengths "
    "batchIndexMapping multimodalEmbeddings extraInputTensors generationRound maxGenerateLength "
    "activeBatchSize originalBatchSize genAndSaveSystemCacheIndex stream initialize"
)
SEEDS = f"{EXECUTOR} {RUNNER} {CONFIG} {PIPELINE} {RESOURCES} {RUNTIME} {CONTEXT}".split()
FILES = {"config.json", "embedding.safetensors", "model.onnx.data"}


def table() -> list[tuple[str, str]]:
    """The rows of the page: what a seed has, and what is here."""
    lines = (ROOT / "docs" / "seeds.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return [(row[0], row[1]) for row in cells if len(row) == 2]


HERE = sorted({name for _, here in table() for name in re.findall(r"`([^`]+)`", here)})


@cache
def modules() -> list[ModuleType]:
    """The files that the page names."""
    paths = [name for name in HERE if name.endswith(".py")]
    return [importlib.import_module("runtime." + one[:-3].replace("/", ".")) for one in paths]


@cache
def words() -> set[str]:
    """What an engine is described by: its bindings, the fields of its configuration, errors."""
    config = LLMEngineRunnerConfig.__struct_fields__
    arguments = {word for name in HERE for word in re.findall(r"\w+", name.partition("(")[2])}
    return {*config, *FILES, *get_args(Code), *BINDINGS, *arguments}


BINDINGS = {
    "hidden_states",
    "hidden_states_from_draft",
    "hidden_states_input",
    "attention_pos_id",
    "deepstack_embeds_{k}",
    "last_token_ids",
    "packed_mask",
    "rope_cos",
    "rope_sin",
    "tree_mask",
}


def has(owner: Any, name: str) -> bool:
    """Whether a class has an attribute, or each of its objects gets one."""
    return hasattr(owner, name) or f"self.{name}" in inspect.getsource(owner)


def find(path: str) -> Any:
    """What `Class`, `function` or `Class.member` means in one of the files; None for nothing."""
    first, _, member = path.partition(".")
    for module in modules():
        owner = getattr(module, first, None)
        if owner is not None:
            if not member:
                return owner
            assert has(owner, member), path
            return getattr(owner, member, owner)
    return None


@pytest.mark.parametrize("name", SEEDS)
def test_every_name_of_a_seed_has_a_row(name: str) -> None:
    assert any(re.search(rf"`{re.escape(name)}[`(]", seed) for seed, _ in table())


@pytest.mark.parametrize("name", HERE)
def test_what_a_row_names_is_here(name: str) -> None:
    path, bracket, arguments = name.partition("(")
    if path.endswith(".py"):
        assert (ROOT / "runtime" / path).exists()
        return
    found = find(path)
    if found is None:
        assert path in words()
    elif bracket:
        given = [word for word in arguments.rstrip(")").split(", ") if word]
        every = inspect.signature(found).parameters
        taken = [one for one in every if one not in {"self", "cls"}]
        plain = [one.lstrip("_") for one in taken]
        assert plain[: len(given)] == given
        rest = [every[one] for one in taken[len(given) :]]
        assert all(one.default is not inspect.Parameter.empty for one in rest)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMInferenceRuntime]:
    """A small base with its draft."""
    folder = export_with_draft("qwen3", tmp_path_factory.mktemp("seeds"))
    options = RuntimeOptions(speculation=SpeculationOptions(method="eagle", adaptive=False))
    with closing(LLMInferenceRuntime.open(folder, options)) as opened:
        yield opened


def test_the_executor_tells_what_its_engine_is(runtime: LLMInferenceRuntime) -> None:
    executor, config = runtime._runner.executor, runtime.config
    names = [executor.io_tensor_name(index) for index in range(executor.num_io_tensors)]
    assert {spec.name for spec in build_registry_for_llm(config).specs} <= set(names)
    assert executor.binding_dtype("logits") == np.float32
    assert executor.profile_shape("inputs_embeds", 1, "min") == (1, 1, config.hidden_size)
    assert executor.required_context_memory() == 0
    assert executor.engine.io_tensors[0].name == names[0]


def test_the_draft_has_bindings_of_its_own(runtime: LLMInferenceRuntime) -> None:
    assert runtime._speculation is not None
    proposer = runtime._speculation.proposer
    assert isinstance(proposer, EagleProposer)
    draft = proposer._draft
    specs = build_registry_for_spec_decode_draft(draft._config).specs
    executor = draft.executor
    names = {executor.io_tensor_name(index) for index in range(executor.num_io_tensors)}
    assert {spec.name for spec in specs} <= names
    assert {"hidden_states", "hidden_states_input", "hidden_states_from_draft"} <= names
    draft.capture_draft_proposal_graph([1], proposer._hidden)
    assert executor.counters.captures > 0


def test_the_runner_prefills_decodes_and_verifies(runtime: LLMInferenceRuntime) -> None:
    runner = runtime._runner
    config, caches = runner.get_engine_config(), runner.get_kv_cache()
    assert [one.name for one in runner.get_rope_cos_sin_tensors()] == ["rope_cos", "rope_sin"]
    runner.capture_vanilla_decoding_graph([1])
    runner.capture_eagle_base_tree_decoding_graph([1], [2])
    runner.reset(1)
    logits = runner.execute_prefill_step(np.array([[3, 4, 5]]), [3])
    assert logits.shape[-1] == config.output_vocab_size
    prefix = caches.capture(0, 3)
    hits = runner.executor.counters.hits
    runner.execute_vanilla_decoding_step(1)
    runner.execute_eagle_base_tree_decoding_step(1, 2)
    runner.commit_path([[0, 1]])
    assert runner.executor.counters.hits == hits + 2
    assert caches.row_lengths == [3 + 1 + 2]
    caches.restore(0, prefix)
    assert (caches.row_lengths, caches.batch) == ([3], 1)
    runner.reset(0)


def test_a_request_is_served_whole(runtime: LLMInferenceRuntime) -> None:
    assert runtime.capture([1]) is not None
    options = RequestOptions(max_tokens=6, ignore_eos=True)
    row = RowRequest(token_ids=[3, 4, 5], prompt_length=3, options=options)
    response = runtime.handle_request(GenerationRequest(rows=[row]))
    assert [len(one.token_ids) for one in response.rows] == [6]
    assert runtime.prefill_metrics.tokens == 3
    assert runtime.generation_metrics.tokens >= 5
    assert runtime.speculation_metrics.rounds > 0


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        (InferenceDims.prefill, (2, 7, 64)),
        (InferenceDims.decode, (2, 64)),
        (InferenceDims.spec_verify, (2, 5, 64)),
        (InferenceDims.proposal, (2, 6, 3, 64)),
        (InferenceDims.accept, (2, 4, 64)),
    ],
)
def test_a_recipe_starts_every_row_and_masks_the_whole_step(
    recipe: Callable[..., InferenceDims], sizes: tuple[int, ...]
) -> None:
    dims = recipe(*sizes)
    assert (dims.batch, dims.start_index_len, dims.kv_len) == (2, 2, 64)
    assert dims.attn_mask_seq_len == dims.seq_len
    assert len(dims) == 6
