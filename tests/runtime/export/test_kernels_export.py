"""Engine folders of Hearth's own kernels: the checkpoint's numbers or integers, by plain names."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from safetensors.numpy import load_file

from hearth.runtime.config import (
    WEIGHTS_FILE,
    DType,
    LLMEngineRunnerConfig,
    Quantization,
    load_config,
)
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.engine_folder import (
    ANSWER_FILE,
    DRAFT_FOLDER,
    LAYOUT_FILE,
    ROPE_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    verify_folder,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.draft_config import open_draft
from hearth.runtime.export.export import export_weights, gpu_dtype
from hearth.runtime.export.layout import EMBEDDING
from hearth.runtime.export.options import TargetType
from hearth.runtime.export.reference_pass import RoundedWeights
from hearth.runtime.export.weights import Kind, Quantised, unpack, widen
from hearth.runtime.known_answer import load_answer
from hearth.runtime.memory.sizes import projection_bytes
from hearth.runtime.tensors.tensor import Tensor, TensorMap, numpy_dtype
from hearth.runtime.vision_config import VISION_FOLDER, load_vision_config
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager, answer_of
from hearth.runtime.weights.weights_file import WeightLayout, load_layout
from tests.eagle_models import write_draft
from tests.references import reference_folder
from tests.runtime.export.hugging_face import change_tensors, copy_model, shallow_model
from tests.runtime.weights.external_models import tuned
from tests.vision_models import write_vision_model

KERNELS = ExportOptions(backend="kernels", device="cuda", dtype="float16", capacity=64)
FILES = {WEIGHTS_FILE, LAYOUT_FILE, ROPE_FILE, TOKENIZER_FILE, TEMPLATE_FILE, ANSWER_FILE}
ATTENTION = {name: f"self_attn.{name}_proj.weight" for name in "qkvo"}
MLP = {name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
NORMS = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
}
HEAD_NORMS = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
BIASES = {f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"}


def made(
    model: Path, target: Path, options: ExportOptions = KERNELS, **changes: Any
) -> LLMEngineRunnerConfig:
    return export_model(model, target, structs.replace(options, **changes))


def biased(target: Path) -> Path:
    """A model of Qwen2, whose heads kernels serve."""
    return copy_model("qwen2", target, num_attention_heads=2, num_key_value_heads=1, head_dim=16)


def compare(
    folder: Path, checkpoint: Checkpoint, wanted: dict[str, str], dtype: TargetType
) -> None:
    """Every tensor of the file, byte for byte, and no other."""
    stored = load_file(folder / WEIGHTS_FILE)
    assert stored.keys() == wanted.keys()
    for name, source in wanted.items():
        shape, every = checkpoint.shape(source), slice(None)
        plain = len(shape) == 1
        numbers = checkpoint.vector(source) if plain else checkpoint.matrix(source, every, every)
        assert stored[name].dtype == numpy_dtype(dtype)
        assert stored[name].shape == shape
        assert stored[name].tobytes() == numbers.astype(numpy_dtype(dtype)).tobytes(), name


@pytest.mark.parametrize(
    ("name", "dtype", "more"),
    [
        ("llama", "float16", {}),
        ("qwen3", "bfloat16", HEAD_NORMS),
        ("qwen2", "float16", BIASES),
        ("llama_linear", "bfloat16", {}),
    ],
)
def test_the_file_holds_the_checkpoint_by_plain_names(
    tmp_path: Path, name: str, dtype: TargetType, more: dict[str, str]
) -> None:
    model = biased(tmp_path / "model") if name == "qwen2" else reference_folder(name)
    config = made(model, tmp_path / "engine", dtype=dtype)
    layer = {**ATTENTION, **MLP, **NORMS, **more}
    wanted = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    for number in range(3):
        wanted |= {
            f"layers.{number}.{one}": f"model.layers.{number}.{source}"
            for one, source in layer.items()
        }
    layout = load_layout(tmp_path / "engine")
    if not layout.model.tied_head:
        wanted["head"] = "lm_head.weight"
    compare(tmp_path / "engine", Checkpoint(model), wanted, dtype)
    assert (layout.bound, layout.head) == (True, "head" if "head" in wanted else "embedding")
    assert layout.tensors.keys() == wanted.keys()
    assert all(one.offset % 16 == 0 for one in layout.tensors.values())
    assert (config.dtype, config.kv_cache_dtype) == (dtype, dtype)


def test_the_folder_has_no_graph_and_passes_its_own_check(tmp_path: Path) -> None:
    config = made(reference_folder("qwen3"), tmp_path / "engine")
    assert load_config(tmp_path / "engine") == config
    verify_folder(tmp_path / "engine", config, digests=True)
    assert set(config.files) == FILES
    assert {path.name for path in (tmp_path / "engine").iterdir()} == {*FILES, "config.json"}
    assert (config.backend, config.device, config.dialect) == ("kernels", "cuda", "native")
    assert (config.operators, config.chains_only) == ("standard", False)
    answer = load_answer(tmp_path / "engine", config)
    assert answer is not None
    assert len(answer.token_ids) == len(answer.best)


def test_a_changed_file_is_found(tmp_path: Path) -> None:
    config = made(reference_folder("qwen3"), tmp_path / "engine")
    path = tmp_path / "engine" / WEIGHTS_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(HearthError) as caught:
        verify_folder(tmp_path / "engine", config, digests=True)
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", WEIGHTS_FILE)
    path.unlink()
    with pytest.raises(HearthError, match="is missing"):
        verify_folder(tmp_path / "engine", config, digests=False)


def test_no_engine_library_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> str:
        raise HearthError("engine_incompatible", "there is no engine library")

    monkeypatch.setattr("hearth.runtime.export.options.installed_version", ask)
    assert made(reference_folder("qwen3"), tmp_path / "engine").dialect == "native"


def test_a_draft_is_an_engine_of_kernels_inside(tmp_path: Path) -> None:
    model = reference_folder("qwen3")
    folder = write_draft(model, tmp_path / "draft", form="offset", vocabulary=96)
    config = made(model, tmp_path / "engine", draft=DraftOptions(folder=folder))
    inside = tmp_path / "engine" / DRAFT_FOLDER
    draft = load_config(inside)
    verify_folder(inside, draft, digests=True)
    assert set(draft.files) == {WEIGHTS_FILE, LAYOUT_FILE, ROPE_FILE, VOCABULARY_FILE}
    assert (draft.backend, draft.external_weight_files) == ("kernels", (WEIGHTS_FILE,))
    assert config.takes_tree_mask
    assert draft.takes_tree_mask
    assert (config.max_verify_tree_size, draft.max_draft_tree_size) == (60, 60)
    layer = {
        **ATTENTION, **MLP,
        "embedded_norm": "input_layernorm.weight",
        "fused_norm": "hidden_norm.weight",
        "post_norm": "post_attention_layernorm.weight",
    }  # fmt: skip
    wanted = {f"layers.0.{one}": f"midlayer.{source}" for one, source in layer.items()}
    wanted |= {"fc": "fc.weight", "norm": "norm.weight", "head": "lm_head.weight"}
    compare(inside, open_draft(folder), wanted, "float16")
    assert load_layout(inside).tensors["layers.0.q"].shape[1] == 2 * config.hidden_size


def opened(folder: Path) -> ExternalWeightManager:
    weights = ExternalWeightManager.open(folder, load_config(folder))
    assert weights is not None
    return weights


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_what_is_bound_is_the_file_and_a_tied_head_the_table(tmp_path: Path, name: str) -> None:
    made(reference_folder(name), tmp_path / "engine")
    stored = load_file(tmp_path / "engine" / WEIGHTS_FILE)
    weights, tensors = opened(tmp_path / "engine"), TensorMap()
    table = Tensor("embedding", weights.table)
    weights.load(CpuDevice(), table)
    weights.publish(tensors)
    # The runtime alone reads a table beside a head of its own.
    assert set(tensors) == stored.keys() - ({"embedding"} if "head" in stored else set())
    assert {spec.name for spec in weights.specs} == set(tensors)
    for spec in weights.specs:
        tensor = tensors.get(spec.name)
        assert (tensor.dtype, tensor.shape) == (spec.dtype, spec.shape)
        np.testing.assert_array_equal(tensor.array, stored[spec.name])
    assert "head" in stored or tensors.get("embedding") is table
    assert weights.loaded is not None
    loaded = sum(tensors.get(name).nbytes for name in tensors if name != "embedding")
    assert weights.loaded.nbytes == loaded


def test_a_drafts_weights_are_bound_without_a_table(tmp_path: Path) -> None:
    model = reference_folder("qwen3")
    folder = write_draft(model, tmp_path / "draft")
    made(model, tmp_path / "engine", draft=DraftOptions(folder=folder))
    weights, tensors = opened(tmp_path / "engine" / DRAFT_FOLDER), TensorMap()
    weights.load(CpuDevice())
    weights.publish(tensors)
    assert set(tensors) == load_file(tmp_path / "engine" / DRAFT_FOLDER / WEIGHTS_FILE).keys()


def test_a_fine_tunes_weights_are_those_of_its_own_engine(tmp_path: Path) -> None:
    model = shallow_model("qwen3", tmp_path / "model")
    other = tuned(model, tmp_path / "other")
    engine, own = tmp_path / "engine", tmp_path / "own"
    config = made(model, engine)
    made(other, own)
    written = export_weights(other, engine, tmp_path / "weights")
    assert (tmp_path / "weights").read_bytes() == (own / WEIGHTS_FILE).read_bytes()
    assert written.note.source == "other"
    assert answer_of(engine, config, str(tmp_path / "weights")) == load_answer(own, config)
    # The folder's own file must be its own model's.
    (engine / WEIGHTS_FILE).write_bytes((own / WEIGHTS_FILE).read_bytes())
    with pytest.raises(HearthError) as caught:
        ExternalWeightManager.open(engine, config)
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", WEIGHTS_FILE)


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    made(shallow_model("qwen3", tmp_path / "model"), engine)
    with pytest.raises(HearthError) as caught:
        export_weights(reference_folder("qwen3"), engine, tmp_path / "weights")
    assert (caught.value.code, caught.value.field) == ("model_unsupported", "num_layers")
    assert not (tmp_path / "weights").exists()


def test_a_tower_stays_an_engine_of_onnx_runtime(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    config = made(model, tmp_path / "engine")
    tower = load_vision_config(tmp_path / "engine")
    assert tower is not None
    assert (tower.backend, tower.device, tower.dtype) == ("onnxruntime", "cuda", "float16")
    verify_folder(tmp_path / "engine" / VISION_FOLDER, tower, digests=True)
    assert (config.backend, config.num_deepstack_features) == ("kernels", 2)
    assert config.use_context_dependent_rope
    assert "layers.2.q_norm" in load_layout(tmp_path / "engine").tensors


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "bfloat16"),
        ({"quantization": "int4"}, "bfloat16"),
        ({"head_quantization": "int8"}, "bfloat16"),
        ({"backend": "onnxruntime"}, "bfloat16"),
        ({"backend": "onnxruntime", "quantization": "int4"}, "float16"),
        ({"backend": "onnxruntime", "draft": DraftOptions(folder=Path("d"))}, "float16"),
        ({"backend": "tensorrt"}, "float16"),
    ],
)
def test_a_gpu_has_a_checkpoint_in_its_own_16_bits(
    tmp_path: Path, changes: dict[str, Any], dtype: str
) -> None:
    model = copy_model("llama", tmp_path / "model")

    def narrow(tensors: dict[str, Any]) -> None:
        tensors.update({name: one.astype(ml_dtypes.bfloat16) for name, one in tensors.items()})

    assert gpu_dtype(model, structs.replace(KERNELS, **changes)) == "float16"
    change_tensors(model, narrow)
    assert gpu_dtype(model, structs.replace(KERNELS, **changes)) == dtype


def test_adapters_take_a_pair_for_each_product(tmp_path: Path) -> None:
    config = made(reference_folder("qwen3"), tmp_path / "engine", max_lora_rank=8)
    assert (config.max_supported_lora_rank, config.lora_targets) == (
        8, ("qkv", "o", "gate_up", "down"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": "cpu"}, "device"),
        ({"dtype": "float32"}, "dtype"),
        ({"dialect": "classic"}, "dialect"),
        ({"quantization": "int8", "block_size": 16}, "block_size"),
        ({"draft": DraftOptions(folder=Path("d"), verify="trees")}, "verify"),
        ({"draft": DraftOptions(folder=Path("d"), drafting_top_k=4)}, "drafting_top_k"),
        ({"backend": "tensorrt"}, "backend"),
    ],
    ids=str,
)
def test_what_is_for_another_backend_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(HearthError) as caught:
        made(tmp_path / "nothing", tmp_path / "engine", **changes)
    assert (caught.value.code, caught.value.field) == ("unsupported_option", field)


@pytest.mark.parametrize(
    ("name", "fields", "field"),
    [
        ("qwen2", {}, "head_dim"),
        ("qwen3_untied", {}, "head_dim"),
    ],
)
def test_sizes_that_kernels_do_not_serve_are_refused_by_name(
    tmp_path: Path, name: str, fields: dict[str, Any], field: str
) -> None:
    model = copy_model(name, tmp_path / "model", **fields)
    with pytest.raises(HearthError, match="export with --backend onnxruntime") as caught:
        made(model, tmp_path / "engine")
    assert (caught.value.code, caught.value.field) == ("model_unsupported", field)
    assert not (tmp_path / "engine").exists()


HOME = Path(__file__).parents[3] / "models" / "home"
TYPES: dict[DType, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def stored(folder: Path, layout: WeightLayout, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    entry = layout.tensors[name]
    data = (folder / "weights.safetensors").read_bytes()[entry.offset :][: entry.nbytes]
    kind = np.dtype(np.uint8) if entry.dtype == "U8" else dtype
    return np.frombuffer(data, kind).reshape(entry.shape)


@pytest.mark.parametrize(
    ("kind", "head", "dtype", "block"),
    [
        ("int8", "body", "float16", 64),
        ("int4", "none", "bfloat16", 32),
        ("int4", "int8", "float16", 64),
        ("none", "int4", "bfloat16", 32),
    ],
)
def test_the_file_holds_integers_and_what_they_mean(
    tmp_path: Path, kind: Quantization, head: Any, dtype: DType, block: int
) -> None:
    options = ExportOptions(
        backend="kernels",
        device="cuda",
        dtype=dtype,
        quantization=kind,
        head_quantization=head,
        block_size=block,
    )
    folder, source = tmp_path / "engine", Checkpoint(HOME)
    config = export_model(HOME, folder, options)
    assert (config.weight_quantization, config.weight_block_size) == (kind, block)
    verify_folder(folder, config, digests=True)
    assert load_answer(folder, config) is not None
    layout, reference = load_layout(folder), RoundedWeights(source, config)
    assert layout.head == ("embedding" if config.head_weights == "none" else "head")
    checked: list[tuple[str, str, Quantization]] = [
        ("layers.3.down", "model.layers.3.mlp.down_proj.weight", kind),
        ("layers.11.q", "model.layers.11.self_attn.q_proj.weight", kind),
        (layout.head, EMBEDDING, config.head_weights),
    ]
    for name, origin, form in checked:
        integers = stored(folder, layout, name, TYPES[dtype])
        if form == "none":
            assert integers.dtype == TYPES[dtype]
            continue
        made = of_form(form, integers, stored(folder, layout, f"{name}.scale", TYPES[dtype]))
        assert made.scales.shape == (len(integers), made.integers.shape[1] // block)
        wide = widen(made, TYPES[dtype]).astype(np.float32)
        eye = np.eye(made.integers.shape[1], dtype=np.float32)
        np.testing.assert_array_equal(reference.project(eye, origin), wide.T)
    whole = stored(folder, layout, "embedding", TYPES[dtype]).nbytes
    products = sum(
        entry.nbytes for name, entry in layout.tensors.items() if "norm" not in name
    ) - whole * (layout.head == "head")
    assert products == projection_bytes(config)


def of_form(kind: Kind, integers: NDArray[np.uint8], scales: NDArray[Any]) -> Quantised:
    return Quantised(kind, unpack(integers) if kind == "int4" else integers, scales)


def test_inputs_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    options = ExportOptions(backend="kernels", device="cuda", dtype="float16", quantization="int4")
    with pytest.raises(HearthError, match="block_size and 64 must divide") as caught:
        export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "block_size")
