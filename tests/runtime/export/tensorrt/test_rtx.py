"""Every graph that the exporter makes, parsed and built by a real builder, which needs no GPU."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.config import LLMEngineRunnerConfig, load_config
from hearth.runtime.engine_folder import DRAFT_FOLDER, MODEL_FILE, PLAN_FILE, verify_folder
from hearth.runtime.errors import HearthError
from hearth.runtime.export import export_model
from hearth.runtime.export.options import Dialect, PlanOptions, TargetType
from hearth.runtime.export.tensorrt import plan
from hearth.runtime.export.tensorrt.plan import run_builder
from hearth.runtime.tensors.profiles import build_profiles
from hearth.runtime.tensors.registry import (
    TensorRegistry,
    build_registry_for_llm,
    build_registry_for_spec_decode_draft,
)
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager
from tests.references import reference_folder
from tests.runtime.export.hugging_face import shallow_model
from tests.runtime.export.tensorrt.graphs import WIDE, graph_options, small_draft
from tests.vision_models import Family, write_vision_model

rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")
pytestmark = [
    pytest.mark.rtx,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
FAMILIES = ("qwen3", "qwen3_untied", "qwen2", "llama", "llama_biased")
# Asked once: the version of a builder does not change.
ONCE = cache(plan.probe_builder)
TYPES = {"float16": "HALF", "bfloat16": "BF16", "float32": "FLOAT", "int32": "INT32",
         "int64": "INT64", "bool": "BOOL"}  # fmt: skip
# Their heads are smaller than any that a fused attention serves.
SMALL_HEADS = ("qwen2",)
DIALECTS: tuple[Dialect, ...] = ("native", "classic")
DTYPES: tuple[TargetType, ...] = ("float16", "bfloat16")


@pytest.fixture(autouse=True)
def _probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "probe_builder", ONCE)


def test_it_is_taken_where_nobody_says_which() -> None:
    assert plan.probe_builder(PlanOptions()).builder == "tensorrt_rtx"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_builder_takes_the_graph_and_its_profiles(
    tmp_path: Path, family: str, dialect: Dialect
) -> None:
    """Of one layer: the builder takes as long for each of them, and others are built below.

    Types have their turn: a dialect is built in both of them.
    """
    dtype = DTYPES[(FAMILIES.index(family) + DIALECTS.index(dialect)) % len(DTYPES)]
    target, model = tmp_path / "engine", shallow_model(family, tmp_path / "model")
    config = export_model(model, target, graph_options(dialect, dtype))
    served = "classic" if family in SMALL_HEADS else dialect
    assert (config.dialect, config.dtype, config.backend) == (served, dtype, "tensorrt")
    assert config.static_decode_batches == (1, 2, 4)
    assert config.plan is not None
    assert config.plan.tensorrt_version == rtx.__version__
    assert (target / PLAN_FILE).stat().st_size > 10_000
    assert not (target / MODEL_FILE).exists()
    verify_folder(target, load_config(target), digests=True)


@pytest.mark.parametrize(("dialect", "dtype"), [("native", "float16"), ("classic", "float32")])
def test_engines_that_take_adapters_are_built(
    tmp_path: Path, dialect: Dialect, dtype: TargetType
) -> None:
    target, model = tmp_path / "engine", shallow_model("qwen3", tmp_path / "model")
    config = export_model(model, target, graph_options(dialect, dtype, max_lora_rank=8))
    assert (config.dialect, config.dtype, config.max_supported_lora_rank) == (dialect, dtype, 8)
    assert not (target / MODEL_FILE).exists()
    verify_folder(target, load_config(target), digests=True)


@pytest.mark.parametrize("head", ["body", "none"])
@pytest.mark.parametrize(
    ("family", "dialect", "dtype"),
    [("qwen3", "native", "float16"), ("llama", "classic", "bfloat16")],
)
def test_engines_of_four_bits_are_built(
    tmp_path: Path, family: str, dialect: Dialect, dtype: TargetType, head: Any
) -> None:
    target, model = tmp_path / "engine", shallow_model(family, tmp_path / "model")
    options = graph_options(dialect, dtype, quantization="int4", head_quantization=head)
    config = export_model(model, target, options)
    assert (config.dialect, config.dtype, config.backend) == (dialect, dtype, "tensorrt")
    assert (config.weight_quantization, config.weight_block_size) == ("int4", 32)
    assert not (target / MODEL_FILE).exists()
    verify_folder(target, load_config(target), digests=True)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_inputs_of_adapters_are_those_of_the_registry(
    tmp_path: Path, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("hearth.runtime.export.tensorrt.plan.run_builder",
                        lambda _python, job, _progress=None: _inspect(job, seen))  # fmt: skip
    target, draft = tmp_path / "engine", small_draft("qwen3", tmp_path)
    options = graph_options(dialect, "float16", draft, max_lora_rank=8)
    config = export_model(reference_folder("qwen3"), target, options)
    registry = build_registry_for_llm(config)
    assert ("lora_a_qkv_0", (32, 24)) in [(one.name, one.shape) for one in registry.own_specs]
    _compare_bindings(seen[0], config, registry)
    made = load_config(target / DRAFT_FOLDER)
    _compare_bindings(seen[1], made, build_registry_for_spec_decode_draft(made))


@pytest.mark.parametrize(
    ("family", "dialect", "dtype"),
    [("qwen3", "native", "float16"), ("qwen2", "classic", "float32")],
)
def test_engines_that_bind_their_weights_are_built(
    tmp_path: Path, family: str, dialect: Dialect, dtype: TargetType
) -> None:
    """Norms, and biases of qwen2, are bound as well as products: nothing is left in the plan."""
    target, model = tmp_path / "engine", shallow_model(family, tmp_path / "model")
    options = graph_options(dialect, dtype, external_weights=True, max_lora_rank=8)
    config = export_model(model, target, options)
    assert (config.dialect, config.dtype, config.backend) == (dialect, dtype, "tensorrt")
    assert not (target / MODEL_FILE).exists()
    verify_folder(target, load_config(target), digests=True)
    assert ExternalWeightManager.open(target, config) is not None


def test_weights_that_are_bound_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("hearth.runtime.export.tensorrt.plan.run_builder",
                        lambda _python, job, _progress=None: _inspect(job, seen))  # fmt: skip
    target = tmp_path / "engine"
    options = graph_options("native", "float16", external_weights=True)
    config = export_model(reference_folder("qwen3_untied"), target, options)
    weights, registry = ExternalWeightManager.open(target, config), build_registry_for_llm(config)
    assert weights is not None
    for spec in weights.specs:
        registry.add_own(spec)
    assert ("head", (32, 288)) in [(one.name, one.shape) for one in registry.own_specs]
    _compare_bindings(seen[0], config, registry)


@pytest.mark.parametrize(
    ("family", "dialect", "dtype"),
    [
        ("qwen3_vl", "native", "float16"),
        ("qwen3_vl", "classic", "float32"),
        ("qwen2_5_vl", "classic", "float16"),
        ("idefics3", "native", "float16"),
    ],
)
def test_the_text_of_models_that_take_images_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family, dialect: Dialect,
    dtype: TargetType,
) -> None:  # fmt: skip
    """Their towers are built elsewhere; what takes trees and features here takes adapters too."""
    monkeypatch.setattr("hearth.runtime.export.export.write_vision", lambda *_: None)
    source, target = write_vision_model(tmp_path / "m", family), tmp_path / "engine"
    draft = small_draft(source, tmp_path) if family == "qwen3_vl" else None
    options = graph_options(dialect, dtype, draft, max_lora_rank=8 if draft else 0)
    config = export_model(source, target, options)
    assert (config.dialect, config.dtype, config.image_token_id > 0) == (dialect, dtype, True)
    for folder in (target, *([target / DRAFT_FOLDER] if draft else [])):
        assert load_config(folder).plan is not None
        assert not (folder / MODEL_FILE).exists()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_profiles_have_tables_and_features_of_every_row(
    tmp_path: Path, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("hearth.runtime.export.export.write_vision", lambda *_: None)
    monkeypatch.setattr("hearth.runtime.export.tensorrt.plan.run_builder",
                        lambda _python, job, _progress=None: _inspect(job, seen))  # fmt: skip
    source, target = write_vision_model(tmp_path / "m", "qwen3_vl"), tmp_path / "engine"
    draft = small_draft(source, tmp_path)
    base = export_model(source, target, graph_options(dialect, "float16", draft))
    made = load_config(target / DRAFT_FOLDER)
    _compare_bindings(seen[0], base, build_registry_for_llm(base))
    _compare_bindings(seen[1], made, build_registry_for_spec_decode_draft(made))
    slots, pairs = base.max_kv_cache_capacity, base.rotary_dim // 2
    decode = seen[0]["profiles"][2]
    assert decode["rope_cos"] == [[2, slots, pairs]] * 3
    assert decode["deepstack_embeds_1"] == [[2, 1, base.hidden_size]] * 3


def test_timings_go_from_build_to_build(tmp_path: Path) -> None:
    model = shallow_model("qwen3", tmp_path / "model")
    options = graph_options("classic", "float16")
    assert options.plan is not None
    timings = tmp_path / "cache" / "timings"
    options = structs.replace(options, plan=structs.replace(options.plan, timing_cache=timings))
    for name in ("first", "second"):
        export_model(model, tmp_path / name, options)
        assert timings.stat().st_size > 100
        assert (tmp_path / name / PLAN_FILE).is_file()


def test_without_a_fused_attention_the_classic_dialect_is_built(tmp_path: Path) -> None:
    # There is none for float32.
    options = graph_options("native", "float32")
    model = shallow_model("qwen3", tmp_path / "model")
    config = export_model(model, tmp_path / "engine", options)
    assert (config.dialect, config.use_trt_native_ops) == ("classic", False)


def test_wide_caches_are_built_and_bound_as_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = graph_options("classic", "float16", plan=WIDE)
    model = shallow_model("qwen3", tmp_path / "model")
    config = export_model(model, tmp_path / "engine", options)
    assert (config.dtype, config.kv_cache_dtype) == ("float16", "float32")
    assert config.plan is not None
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("hearth.runtime.export.tensorrt.plan.run_builder",
                        lambda _python, job, _progress=None: _inspect(job, seen))  # fmt: skip
    target = tmp_path / "drafted"
    draft = small_draft("qwen3", tmp_path)
    base = export_model(reference_folder("qwen3"), target, structs.replace(options, draft=draft))
    _compare_bindings(seen[0], base, build_registry_for_llm(base))
    made = load_config(target / DRAFT_FOLDER)
    assert made.kv_cache_dtype == "float32"
    _compare_bindings(seen[1], made, build_registry_for_spec_decode_draft(made))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_bindings_and_profiles_are_those_of_the_registry(
    tmp_path: Path, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("hearth.runtime.export.tensorrt.plan.run_builder",
                        lambda _python, job, _progress=None: _inspect(job, seen))  # fmt: skip
    target = tmp_path / "engine"
    config = export_model(reference_folder("qwen3"), target, graph_options(dialect, "float16"))
    (network,) = seen
    _compare_bindings(network, config, build_registry_for_llm(config))
    assert numpy_dtype(config.dtype).name == "float16"


def _compare_bindings(
    network: dict[str, Any], config: LLMEngineRunnerConfig, registry: TensorRegistry
) -> None:
    specs = {spec.name: spec for spec in registry.specs}
    own = {spec.name: spec.shape for spec in registry.own_specs}
    assert set(network["tensors"]) == {*specs, *own, "rope_cos", "rope_sin"}
    assert all(network["tensors"][name][2] == shape for name, shape in own.items())
    for name, spec in specs.items():
        direction, dtype, shape = network["tensors"][name]
        assert (direction, dtype) == (spec.direction, TYPES[spec.dtype.name])
        assert len(shape) == len(spec.shape)
        for have, want in zip(shape, spec.shape, strict=True):
            assert have in (-1, want, config.max_kv_cache_capacity)
    for table, profile in zip(network["profiles"], build_profiles(config), strict=True):
        for name, shapes in table.items():
            assert [tuple(one) for one in shapes] == [
                specs[name].resolve(profile.select(which)) for which in ("min", "opt", "max")
            ]
            for shape in shapes:
                fixed = network["tensors"][name][2]
                assert all(size in (-1, have) for size, have in zip(fixed, shape, strict=True))


def test_a_base_and_its_draft_are_built(tmp_path: Path) -> None:
    """In the classic dialect a model that takes images is built with its draft."""
    target = tmp_path / "engine"
    options = graph_options("native", "float16", small_draft("qwen3", tmp_path))
    base = export_model(reference_folder("qwen3"), target, options)
    draft = load_config(target / DRAFT_FOLDER)
    for folder, config in ((target, base), (target / DRAFT_FOLDER, draft)):
        assert (config.dialect, config.backend) == ("native", "tensorrt")
        assert config.plan is not None
        assert not (folder / MODEL_FILE).exists()
        verify_folder(folder, load_config(folder), digests=True)
    assert (base.max_verify_tree_size, draft.max_draft_tree_size) == (9, 6)
    assert draft.static_drafting == (2, 3)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_bindings_of_speculation_are_those_of_the_registry(
    tmp_path: Path, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("hearth.runtime.export.tensorrt.plan.run_builder",
                        lambda _python, job, _progress=None: _inspect(job, seen))  # fmt: skip
    target = tmp_path / "engine"
    options = graph_options(dialect, "float16", small_draft("llama", tmp_path))
    base = export_model(reference_folder("llama"), target, options)
    draft = load_config(target / DRAFT_FOLDER)
    _compare_bindings(seen[0], base, build_registry_for_llm(base))
    _compare_bindings(seen[1], draft, build_registry_for_spec_decode_draft(draft))


def test_a_graph_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    job = {"module": "tensorrt_rtx", "graph": str(tmp_path / "bad.onnx")}
    with pytest.raises(HearthError, match="cannot be read") as error:
        run_builder(graph_options("native", "float16").plan.python, job)  # type: ignore[union-attr] # there is a plan
    assert error.value.code == "model_unsupported"


def _inspect(job: dict[str, Any], seen: list[dict[str, Any]]) -> dict[str, Any]:
    if job.get("probe"):
        return {"module": "tensorrt_rtx", "tensorrt_version": rtx.__version__}
    logger = rtx.Logger()
    network = rtx.Builder(logger).create_network(
        1 << int(rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    )
    assert rtx.OnnxParser(network, logger).parse_from_file(job["graph"])
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    tensors = {one.name: ("input", one.dtype.name, tuple(one.shape)) for one in inputs}
    tensors |= {one.name: ("output", one.dtype.name, tuple(one.shape)) for one in outputs}
    seen.append({"tensors": tensors, "profiles": job["profiles"]})
    Path(job["output"]).write_bytes(b"plan")
    facts = {"module": "tensorrt_rtx", "tensorrt_version": rtx.__version__}
    return {**facts, "gpu_name": "", "compute_capability": ""}
