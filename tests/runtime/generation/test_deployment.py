from contextlib import closing
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from msgspec import structs

from hearth.runtime.config import WEIGHTS_FILE, LLMEngineRunnerConfig
from hearth.runtime.device.device import MOST_GPU_ROWS
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation import deployment
from hearth.runtime.generation.deployment import (
    Asked,
    DeploymentConfig,
    effective_config,
    resolve_deployment,
    suited_drafting,
)
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
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
        (structs.replace(BASE, backend="kernels"), DRAFT, (1, 7, 8)),
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
    assert (caught.value.code, caught.value.field) == ("invalid_value", "draft_tree")
    assert resolve(base, draft, CHAIN).drafting == CHAIN
    assert resolve(BASE, DRAFT, tree).drafting == tree


@pytest.mark.parametrize(
    ("eagle", "words"),
    [
        (structs.replace(CHAIN, drafting_step=30, verify_tree_size=31), "31 tree nodes to verify"),
        (structs.replace(CHAIN, drafting_top_k=8), "32 tree nodes to propose"),
    ],
)
def test_trees_beyond_the_engines_are_refused_by_name(
    eagle: EagleDraftingConfig, words: str
) -> None:
    base = structs.replace(BASE, max_verify_tree_size=20)
    draft = structs.replace(DRAFT, max_draft_tree_size=30)
    with pytest.raises(HearthError, match=words) as caught:
        resolve(base, draft, eagle)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "draft_tree")


SMALL = RuntimeOptions(capacity=8, speculation=SpeculationOptions(method="auto"))


@pytest.mark.parametrize(
    ("eagle", "words"),
    [
        (
            EagleDraftingConfig(drafting_top_k=4, drafting_step=3, verify_tree_size=16),
            "16 .* verify",
        ),
        (
            EagleDraftingConfig(drafting_top_k=4, drafting_step=2, verify_tree_size=8),
            "8 .* propose",
        ),
    ],
)
def test_a_tree_beyond_the_capacity_in_use_is_refused(
    eagle: EagleDraftingConfig, words: str
) -> None:
    options = structs.replace(SMALL, speculation=SpeculationOptions(method="eagle", eagle=eagle))
    with pytest.raises(HearthError, match=f"{words}.* at this capacity") as caught:
        resolve_deployment(BASE, DRAFT, options)
    assert caught.value.field == "draft_tree"


@pytest.mark.parametrize("capacity", [2, 5, 8, 17])
def test_trees_that_nobody_asked_for_fit_into_the_capacity(capacity: int) -> None:
    options = structs.replace(SMALL, capacity=capacity)
    found = resolve_deployment(BASE, DRAFT, options)
    plain = resolve_deployment(small_config(), None, options)
    # A row holds less by the room that a round needs, so a small one goes without.
    if capacity > 5:
        tree = found.drafting
        assert found.capacity == capacity - (tree.room - 1) >= 2
        assert tree.room == max(tree.tree_size, tree.proposal_size, tree.most_accepted)
    else:
        assert (found.method, found.capacity) == ("off", capacity)
    if capacity > 5:
        assert (plain.method, plain.base.max_verify_tree_size) == ("lookup", 5)
        assert (plain.speculation.lookup_tokens, plain.capacity) == (4, capacity - 4)
    else:
        assert (plain.method, plain.capacity) == ("off", capacity)
        want = structs.replace(options, speculation=SpeculationOptions(method="lookup"))
        with pytest.raises(HearthError, match="leaves 1 tokens") as caught:
            resolve_deployment(small_config(), None, want)
        assert (caught.value.code, caught.value.field) == ("invalid_value", "capacity")
    asked = SpeculationOptions(method="lookup", lookup_tokens=capacity)
    with pytest.raises(HearthError, match="at this capacity") as caught:
        resolve_deployment(small_config(), None, structs.replace(options, speculation=asked))
    assert caught.value.field == "lookup_tokens"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_trees_suit_the_device_that_was_asked_for(device: Literal["cpu", "cuda"]) -> None:
    options = structs.replace(SMALL, capacity=0, device=device)
    tree = resolve_deployment(BASE, DRAFT, options).drafting
    assert (tree.drafting_top_k == 1) is (device == "cpu")


PLAN_BASE = structs.replace(
    BASE, backend="tensorrt", static_decode_batches=(1, 2, 4), max_verify_tree_size=9
)
PLAN_DRAFT = structs.replace(
    DRAFT, backend="tensorrt", static_decode_batches=(1, 2, 4), static_drafting=(2, 5)
)


def test_a_plan_verifies_what_it_was_built_for() -> None:
    for method in ("lookup", "off"):
        options = RuntimeOptions(speculation=SpeculationOptions(method=method))
        found = resolve_deployment(PLAN_BASE, PLAN_DRAFT, options)
        assert (found.method, found.base.max_verify_tree_size) == (method, 9)
    for tokens in (7, 9):
        asked = SpeculationOptions(method="lookup", lookup_tokens=tokens)
        with pytest.raises(HearthError) as caught:
            resolve_deployment(PLAN_BASE, PLAN_DRAFT, RuntimeOptions(speculation=asked))
        assert (caught.value.code, caught.value.field) == ("invalid_value", "lookup_tokens")


TREE = SpeculationOptions(eagle=CHAIN)
TOKENS = SpeculationOptions(lookup_tokens=3)


@pytest.mark.parametrize(
    ("options", "method", "kind", "field"),
    [
        (TREE, "off", "auto", "draft_tree"),
        (TREE, "lookup", "auto", "draft_tree"),
        (TREE, "auto", "simulated", "draft_tree"),
        (TOKENS, "off", "auto", "lookup_tokens"),
        (TOKENS, "auto", "auto", "lookup_tokens"),
        (TOKENS, "eagle", "auto", "lookup_tokens"),
        (TREE, "eagle", "simulated", "speculation"),
        (SpeculationOptions(), "eagle", "simulated", "speculation"),
    ],
)
def test_what_another_method_takes_is_refused(
    options: SpeculationOptions, method: Asked, kind: Literal["auto", "simulated"], field: str
) -> None:
    asked = RuntimeOptions(speculation=structs.replace(options, method=method), engine_kind=kind)
    with pytest.raises(HearthError) as caught:
        resolve_deployment(BASE, DRAFT, asked)
    assert (caught.value.code, caught.value.field) == ("unsupported_option", field)


def test_a_folder_with_a_draft_can_be_simulated() -> None:
    options = RuntimeOptions(engine_kind="simulated", speculation=TOKENS)
    for method in ("off", "auto", "lookup"):
        speculation = SpeculationOptions(method=method)
        asked = structs.replace(options, speculation=speculation)
        for base, draft in ((BASE, DRAFT), (PLAN_BASE, PLAN_DRAFT)):
            found = resolve_deployment(base, draft, asked)
            assert found.method == ("lookup" if method == "lookup" else "off")
            assert found.draft is None


@pytest.mark.parametrize(
    "changes",
    [
        {"base_hidden_dim": 32},
        {"base_hidden_dim": 0},
        {"vocab_size": 99},
        {"hidden_size": 32},
        {"dtype": "float16"},
        {"dialect": "classic"},
        {"device": "cpu"},
        {"backend": "tensorrt"},
    ],
    ids=str,
)
def test_a_draft_of_another_base_is_refused_by_name(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(HearthError) as caught:
        resolve(BASE, structs.replace(DRAFT, **changes), None)
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", name)


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
                    options=RequestOptions(max_tokens=20 + row, ignore_eos=True, temperature=0),
                )
                for row in range(3)
            ]
            found = runtime.handle_request(GenerationRequest(rows=rows))
            answers.append([row.token_ids for row in found.rows])
            assert (runtime.speculation_metrics.rounds > 0) == (method != "off")
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("capacity", [2, 9])
def test_a_small_capacity_serves_the_same_text(tmp_path: Path, capacity: int) -> None:
    folder = export_with_draft("qwen3", tmp_path, capacity=64)
    answers: list[list[int]] = []
    methods: list[Asked] = ["off", "auto"]
    for method in [*methods, "lookup"] if capacity > 5 else methods:
        speculation = SpeculationOptions(method=method, adaptive=False)
        options = RuntimeOptions(capacity=capacity, max_batch=2, speculation=speculation)
        with closing(LLMInferenceRuntime.open(folder, options)) as runtime:
            runtime.capture([1, 2])
            asked = RequestOptions(max_tokens=runtime.capacity - 1, ignore_eos=True)
            row = RowRequest(token_ids=[3], prompt_length=1, options=asked)
            found = runtime.handle_request(GenerationRequest(rows=[row, row])).rows
            assert found[0].token_ids == found[1].token_ids
            answers.append(found[0].token_ids)
    assert all(answers[0][: len(one)] == one for one in answers)
    assert len(answers[0]) == capacity - 1


SIMULATED = simulated_config(max_batch=8, capacity=1000, prefill_chunk=128, step_ms=3)
STORED = structs.replace(SIMULATED, backend="onnxruntime", hidden_size=64, step_ms=0)


def test_without_options_the_folder_decides() -> None:
    assert effective_config(STORED, RuntimeOptions()) == STORED


def test_smaller_limits_are_honoured() -> None:
    config = effective_config(STORED, RuntimeOptions(max_batch=2, capacity=100))
    assert (config.max_supported_batch_size, config.max_kv_cache_capacity) == (2, 100)
    assert (config.max_supported_input_length, config.prefill_chunk) == (99, 100)
    trees = structs.replace(STORED, max_verify_tree_size=128, max_draft_tree_size=128)
    small = effective_config(trees, RuntimeOptions(capacity=100))
    assert (small.max_verify_tree_size, small.max_draft_tree_size) == (100, 99)


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        (RuntimeOptions(max_batch=9), "invalid_value", "max_batch"),
        (RuntimeOptions(capacity=1001), "invalid_value", "capacity"),
        (RuntimeOptions(capacity=1), "invalid_value", "capacity"),
        (RuntimeOptions(threads=-1), "invalid_value", "threads"),
        (RuntimeOptions(max_batch=-1), "invalid_value", "max_batch"),
        (RuntimeOptions(step_ms=2), "unsupported_option", "step_ms"),
        (RuntimeOptions(prefill_us=2), "unsupported_option", "prefill_us"),
        (RuntimeOptions(prefill_us=-1), "invalid_value", "prefill_us"),
    ],
)
def test_an_option_is_honoured_or_refused(options: RuntimeOptions, code: str, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        effective_config(STORED, options)
    assert (caught.value.code, caught.value.field) == (code, field)


@pytest.mark.parametrize(
    ("options", "field"),
    [(RuntimeOptions(threads=2), "threads"), (RuntimeOptions(spin=True), "spin")],
)
def test_settings_of_the_cpus_threads_are_refused_where_they_are_nothing(
    options: RuntimeOptions, field: str
) -> None:
    assert effective_config(STORED, options) == STORED
    plan = structs.replace(STORED, backend="tensorrt", device="cuda")
    gpu = structs.replace(STORED, device="cuda")
    for config in (SIMULATED, plan, *([gpu] if field == "spin" else [])):
        with pytest.raises(HearthError) as caught:
            effective_config(config, options)
        assert (caught.value.code, caught.value.field) == ("unsupported_option", field)


def test_a_folder_can_be_simulated() -> None:
    asked = RuntimeOptions(engine_kind="simulated", step_ms=2, prefill_us=40)
    config = effective_config(STORED, asked)
    assert (config.backend, config.hidden_size) == ("simulated", 1)
    assert (config.step_ms, config.prefill_us) == (2, 40)
    slow = structs.replace(SIMULATED, prefill_us=7.5)
    kept = effective_config(slow, RuntimeOptions())
    assert (kept.step_ms, kept.prefill_us) == (3, 7.5)


def test_a_simulated_folder_holds_no_model() -> None:
    with pytest.raises(HearthError) as caught:
        effective_config(SIMULATED, RuntimeOptions(engine_kind="onnxruntime"))
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "engine_kind")


PLAN = structs.replace(
    STORED, backend="tensorrt", device="cuda", dialect="classic", static_decode_batches=(1, 2, 4, 8)
)


def test_a_plan_serves_the_shapes_it_was_built_with() -> None:
    config = effective_config(PLAN, RuntimeOptions(max_batch=4))
    assert config.static_decode_batches == (1, 2, 4)
    assert effective_config(PLAN, RuntimeOptions()) == PLAN


@pytest.mark.parametrize(
    ("options", "field"),
    [(RuntimeOptions(max_batch=3), "max_batch"), (RuntimeOptions(capacity=999), "capacity")],
)
def test_other_shapes_of_a_plan_are_refused(options: RuntimeOptions, field: str) -> None:
    with pytest.raises(HearthError, match="the plan was built for") as caught:
        effective_config(PLAN, options)
    assert (caught.value.code, caught.value.field) == ("invalid_value", field)


def test_a_batch_beyond_a_gpus_kernels_is_refused_before_anything_is_opened() -> None:
    header = files("hearth.runtime.csrc") / "sampling" / "rows.cuh"
    assert f"#define ROWS {MOST_GPU_ROWS}\n" in header.read_text()
    many = structs.replace(STORED, max_supported_batch_size=MOST_GPU_ROWS + 1)
    assert effective_config(many, RuntimeOptions()) == many
    gpu = RuntimeOptions(device="cuda")
    with pytest.raises(HearthError, match="a GPU serves 256 rows") as caught:
        effective_config(many, gpu)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "max_batch")
    less = structs.replace(gpu, max_batch=MOST_GPU_ROWS)
    assert effective_config(many, less).max_supported_batch_size == MOST_GPU_ROWS


def test_a_graph_of_standard_operators_runs_on_either_device() -> None:
    config = effective_config(STORED, RuntimeOptions(device="cuda"))
    assert config.device == "cuda"
    assert effective_config(config, RuntimeOptions(device="cpu")) == STORED


@pytest.mark.parametrize(
    "stored",
    [
        PLAN,
        structs.replace(STORED, device="cuda", dtype="bfloat16"),
    ],
)
def test_what_a_gpu_library_made_runs_nowhere_else(stored: LLMEngineRunnerConfig) -> None:
    with pytest.raises(HearthError, match="runs on cuda alone") as caught:
        effective_config(stored, RuntimeOptions(device="cpu"))
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "device")


@pytest.mark.parametrize(("stored", "kind"), [(STORED, "tensorrt"), (PLAN, "onnxruntime")])
def test_an_engine_of_another_kind_is_refused(
    stored: LLMEngineRunnerConfig, kind: Literal["onnxruntime", "tensorrt"]
) -> None:
    with pytest.raises(HearthError) as caught:
        effective_config(stored, RuntimeOptions(engine_kind=kind))
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "engine_kind")


def test_a_draft_keeps_its_own_weights_where_others_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = SimpleNamespace(
        enable_eagle_spec_decode=True, external_weight_files=(WEIGHTS_FILE,), files={}
    )
    skipped: dict[Path, tuple[str, ...]] = {}

    def verify(place: Path, _config: object, *, skip: tuple[str, ...], **_: Any) -> None:
        skipped[place] = skip

    monkeypatch.setattr(deployment, "load_config", lambda _: stored)
    monkeypatch.setattr(deployment, "load_vision_config", lambda _: None)
    monkeypatch.setattr(deployment, "_with_weights", lambda *_: stored)
    monkeypatch.setattr(deployment, "verify_folder", verify)
    deployment.load_engines(Path("engine"), RuntimeOptions(weights="other"))
    assert list(skipped.values()) == [(WEIGHTS_FILE,), ()]
