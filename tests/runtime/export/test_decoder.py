"""Exported graphs against stored float32 logits, the installed transformers, and one another."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from msgspec import structs
from safetensors.numpy import load_file

from hearth.runtime.config import load_config
from hearth.runtime.engine_folder import DRAFT_FOLDER, MODEL_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.engine_files import engine_config
from hearth.runtime.export.layout import EMBEDDING, HEAD
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.options import Dialect, PlanOptions, check_options
from hearth.runtime.export.reference_pass import RoundedWeights
from hearth.runtime.export.reference_pass import reference_logits as computed_logits
from hearth.runtime.weights.weights_file import load_layout
from tests.references import NAMES, ReferenceRow, reference_folder, reference_logits, split_rows
from tests.references import reference_logits as stored_logits
from tests.references.images import image_rows
from tests.runtime.conftest import EngineFolders
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.hugging_face import Tensors, change_tensors, copy_model
from tests.runtime.export.trees import TAPS, Array, export_with_draft, random_trees
from tests.vision_models import FAMILIES, write_vision_model

TOLERANCE = 1e-4
HALF_TOLERANCE = 0.1  # logits have a standard deviation of 1.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [4, 16])
def test_logits_agree_in_a_ragged_batch(
    engine_folders: EngineFolders, name: str, dialect: str, chunk: int
) -> None:
    rows = reference_logits(name)
    driver = GraphDriver(engine_folders(name, dialect), len(rows), capacity=32)
    for row, logits in zip(rows, run_rows(driver, rows, chunk), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "llama3_scaled"])
def test_float16_logits_are_close(name: str, dialect: str, tmp_path: Path) -> None:
    options = ExportOptions(dialect=_choice(dialect), dtype="float16")
    export_model(reference_folder(name), tmp_path / "engine", options)
    rows = reference_logits(name)
    driver = GraphDriver(tmp_path / "engine", len(rows), capacity=32)
    for row, logits in zip(rows, run_rows(driver, rows, 8), strict=True):
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, row.logits, atol=HALF_TOLERANCE, rtol=0)


def test_only_the_selected_tokens_get_logits(engine_folders: EngineFolders, dialect: str) -> None:
    row = reference_logits("qwen3")[0]
    driver = GraphDriver(engine_folders("qwen3", dialect), 1, capacity=32)
    logits = driver.logits([row.token_ids[:8]], np.array([[7, 2]]))
    assert logits.shape == (1, 2, driver.config.vocab_size)
    np.testing.assert_allclose(logits[0], row.logits[[7, 2]], atol=TOLERANCE, rtol=0)


def test_what_lies_in_unfilled_slots_does_not_matter(
    engine_folders: EngineFolders, dialect: str
) -> None:
    rows = reference_logits("llama")
    driver = GraphDriver(engine_folders("llama", dialect), len(rows), capacity=40)
    for cache in driver.caches.values():
        cache[:] = 1e4
    for row, logits in zip(rows, run_rows(driver, rows, 5), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("slots", [25, 32, 100])
def test_the_capacity_that_is_bound_does_not_matter(
    engine_folders: EngineFolders, dialect: str, slots: int
) -> None:
    row = reference_logits("qwen2")[0]
    driver = GraphDriver(engine_folders("qwen2", dialect), 1, capacity=slots)
    (logits,) = run_rows(driver, [row], chunk=13)
    np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


def _choice(dialect: str) -> Dialect:
    return "native" if dialect == "native" else "classic"


@pytest.fixture(params=["llama", "llama3_scaled", "llama_linear", "qwen3_vl", "qwen2_5_vl"])
def folders(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str
) -> tuple[list[list[int]], Path, Path]:
    """Prompts for a model, and its engines of chains and of trees."""
    model = request.param
    if model in FAMILIES:
        prompts = [row.token_ids.tolist() for row in image_rows(model)]
        model = write_vision_model(tmp_path / "model", model)
    else:
        prompts = [row.token_ids[: row.prompt_length] for row in reference_logits(model)]
    trees = export_with_draft(model, tmp_path / "trees", dialect=dialect)
    chains = export_with_draft(model, tmp_path / "chains", verify="chains", dialect=dialect)
    return prompts, chains, trees


def open_driver(folder: Path) -> GraphDriver:
    """One row, whose rotary tables are random where it has its own."""
    driver = GraphDriver(folder, 1, capacity=32)
    if driver.config.use_context_dependent_rope:
        turns = np.random.default_rng(2).uniform(0, 9, driver.rope["rope_cos"].shape)
        tables = {"rope_cos": np.cos(turns), "rope_sin": np.sin(turns)}
        driver.rope = {name: table.astype(np.float32) for name, table in tables.items()}
    return driver


@pytest.mark.parametrize("width", [1, 2, 7])
def test_logits_and_hidden_states_are_those_of_an_engine_of_trees(
    folders: tuple[list[list[int]], Path, Path], width: int
) -> None:
    prompts, *engines = folders
    ids = np.random.default_rng(width).integers(3, 90, (1, width))
    for prompt in prompts:
        answers = []
        for folder in engines:
            driver = open_driver(folder)
            driver.step([prompt])
            places = np.arange(width)[None]
            answers.append(driver.run(ids, driver.filled[:, None] + places, places))
        hidden = answers[0]["hidden_states"]
        assert hidden.shape == (1, width, len(TAPS) * driver.config.hidden_size)
        # The first tap is what enters the model, not its norm.
        np.testing.assert_array_equal(hidden[..., : driver.config.hidden_size], driver.table[ids])
        for output in ("logits", "hidden_states"):
            np.testing.assert_allclose(answers[0][output], answers[1][output], atol=TOLERANCE)


def test_drafts_agree(folders: tuple[list[list[int]], Path, Path]) -> None:
    """The newest entries of a row, then a proposal of one token more at a time."""
    _, *engines = folders
    random = np.random.default_rng(3)
    drivers = [open_driver(folder / DRAFT_FOLDER) for folder in engines]
    config = drivers[0].config
    for entries in (6, 1, 3):
        base = random.standard_normal((1, entries, config.base_hidden_dim))
        _agree(drivers, entries, entries - 1, base=base)
        for driver in drivers:
            driver.filled += entries
        for used in (1, 2, 4):
            own = random.standard_normal((1, 4, config.hidden_size))
            _agree(drivers, 4, used - 1, own=own)


def _agree(drivers: list[GraphDriver], width: int, selected: int, **given: np.ndarray) -> None:
    config = drivers[0].config
    shape = (1, width, 1)
    ids = np.random.default_rng(width + selected).integers(3, 90, (1, width))
    base = given.get("base", np.zeros(shape) + np.zeros(config.base_hidden_dim))
    own = given.get("own", np.zeros(shape) + np.zeros(config.hidden_size))
    answers = [
        driver.run(
            ids,
            driver.filled[:, None] + np.arange(width),
            np.array([[selected]]),
            hidden_states_input=base,
            hidden_states_from_draft=own,
        )
        for driver in drivers
    ]
    for output in ("logits", "hidden_states"):
        np.testing.assert_allclose(answers[0][output], answers[1][output], atol=TOLERANCE)


def test_both_engines_have_no_mask(folders: tuple[list[list[int]], Path, Path]) -> None:
    _, chains, _ = folders
    for part in (chains, chains / DRAFT_FOLDER):
        config = load_config(part)
        assert (config.chains_only, config.takes_tree_mask) == (True, False)
        graph = ir.load(part / MODEL_FILE).graph
        assert "tree_mask" not in [value.name for value in graph.inputs]


@pytest.mark.parametrize("name", NAMES)
def test_a_causal_mask_changes_nothing(
    tree_folders: EngineFolders, name: str, dialect: str
) -> None:
    rows = reference_logits(name)
    driver = GraphDriver(tree_folders(name, dialect), len(rows), capacity=32)
    for row, logits in zip(rows, run_rows(driver, rows, chunk=5), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama_biased"])
@pytest.mark.parametrize("nodes", [2, 9])
def test_each_node_sees_its_path_alone(
    tree_folders: EngineFolders, name: str, dialect: str, nodes: int
) -> None:
    driver = _prefilled(tree_folders(name, dialect), name)
    trees = random_trees(3, nodes, driver.config.vocab_size)
    positions = driver.filled[:, None] + trees.depths
    every = np.tile(np.arange(nodes), (3, 1))
    outputs = driver.run(trees.ids, positions, every, trees.mask)
    for row in range(3):
        for node in range(nodes):
            alone = _prefilled(tree_folders(name, dialect), name)
            alone.keep([row])
            path = trees.path(row, node)
            logits = alone.step([[int(trees.ids[row, one]) for one in path]])[0]
            np.testing.assert_allclose(outputs["logits"][row, node], logits[-1], atol=TOLERANCE)
            np.testing.assert_allclose(
                outputs["hidden_states"][row, node],
                alone.outputs["hidden_states"][0, -1],
                atol=TOLERANCE,
            )


def test_a_tree_leaves_the_filled_slots_alone(tree_folders: EngineFolders, dialect: str) -> None:
    driver = _prefilled(tree_folders("llama", dialect), "llama")
    trees = random_trees(3, 6, driver.config.vocab_size)
    before = {name: cache.copy() for name, cache in driver.caches.items()}
    driver.run(trees.ids, driver.filled[:, None] + trees.depths, trees.depths, trees.mask)
    for name, cache in driver.caches.items():
        for row, filled in enumerate(driver.filled):
            np.testing.assert_array_equal(cache[row, :, :filled], before[name][row, :, :filled])


def test_nothing_behind_the_tree_is_seen(tree_folders: EngineFolders, dialect: str) -> None:
    drivers = [_prefilled(tree_folders("qwen3", dialect), "qwen3") for _ in range(2)]
    for cache in drivers[1].caches.values():
        for row, filled in enumerate(drivers[1].filled):
            cache[row, :, filled:] = 1e4
    trees = random_trees(3, 5, drivers[0].config.vocab_size)
    given = (trees.ids, drivers[0].filled[:, None] + trees.depths, trees.depths, trees.mask)
    plain, filthy = (driver.run(*given)["logits"] for driver in drivers)
    np.testing.assert_array_equal(plain, filthy)


@pytest.mark.parametrize("name", ["qwen3", "llama3_scaled"])
def test_hidden_states_are_the_inputs_of_the_tapped_layers(
    tree_folders: EngineFolders, name: str, dialect: str, tmp_path: Path
) -> None:
    driver = GraphDriver(tree_folders(name, dialect), 1, capacity=32)
    row = reference_logits(name)[0]
    logits = driver.step([row.token_ids])[0]
    taps = np.split(driver.outputs["hidden_states"][0], len(TAPS), -1)
    np.testing.assert_array_equal(taps[0], driver.table[row.token_ids].astype(np.float32))
    np.testing.assert_allclose(_head(name, taps[2]), logits, atol=TOLERANCE)
    cut = _without_layers_from(TAPS[1], name, tmp_path / "cut")
    export_model(cut, tmp_path / "engine", ExportOptions())
    shorter = GraphDriver(tmp_path / "engine", 1, capacity=32).step([row.token_ids])[0]
    np.testing.assert_allclose(_head(name, taps[1]), shorter, atol=TOLERANCE)


def _prefilled(folder: Path, name: str) -> GraphDriver:
    rows = reference_logits(name)
    driver = GraphDriver(folder, len(rows), capacity=32)
    driver.step([row.token_ids[: row.prompt_length] for row in rows])
    return driver


def _without_layers_from(first: int, name: str, target: Path) -> Path:
    def drop(tensors: Tensors) -> None:
        for tensor in list(tensors):
            layer = tensor.removeprefix("model.layers.").split(".")[0]
            if layer.isdigit() and int(layer) >= first:
                del tensors[tensor]

    folder = copy_model(name, target, num_hidden_layers=first)
    change_tensors(folder, drop)
    return folder


def _head(name: str, hidden: Array) -> Array:
    tensors = load_file(reference_folder(name) / "model.safetensors")
    weights = {key: np.asarray(value, np.float32) for key, value in tensors.items()}
    normal = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return np.asarray((normal * weights["model.norm.weight"]) @ head.T)


CUDA = ExportOptions(backend="onnxruntime", device="cuda", dtype="float16", quantization="int4")
PLANNED = structs.replace(CUDA, backend="auto", device="cpu", plan=PlanOptions())


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine in float32, which the CPU has kernels for, be one for CUDA."""
    monkeypatch.setattr(
        "hearth.runtime.export.export.engine_config",
        lambda *given: structs.replace(engine_config(*given), device="cuda"),
    )


@pytest.mark.parametrize("head", ["body", "none"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_products_of_four_bits_are_those_of_the_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, head: str
) -> None:
    on_cuda(monkeypatch)
    folder = reference_folder(name)
    options = ExportOptions(quantization="int4", head_quantization=head)  # type: ignore[arg-type]
    config = export_model(folder, tmp_path / "engine", options)
    assert (config.device, config.weight_block_size) == ("cuda", 32)
    graph = ir.load(tmp_path / "engine" / MODEL_FILE).graph
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    # The graph of a layer has four products of which one is of q, k and v and one of gate and up.
    assert len(products) == 4 * config.num_decoder_layers + (head == "body")
    assert not [node for node in graph if node.op_type == "DequantizeLinear"]
    weights = RoundedWeights(Checkpoint(folder), config)
    rows = stored_logits(name)
    driver = GraphDriver(tmp_path / "engine", len(rows), capacity=32)
    for row, logits in zip(rows, run_rows(driver, rows, chunk=8), strict=True):
        expected = computed_logits(load_model_config(folder), weights, row.token_ids)
        np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=0)
        assert np.abs(expected - row.logits).max() > 1e-3


def test_they_may_lie_beside_the_graph(tmp_path: Path) -> None:
    options = structs.replace(CUDA, external_weights=True)
    export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    layout, config = load_layout(tmp_path / "engine"), load_config(tmp_path / "engine")
    head, scale = layout.tensors["head"], layout.tensors["head_scale"]
    blocks = (config.vocab_size, config.hidden_size // 32)
    assert (layout.head, head.dtype, head.shape) == ("head", "U8", (*blocks, 16))
    assert (scale.dtype, scale.shape) == ("F16", blocks)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (structs.replace(CUDA, quantization="int8"), "quantization"),
        (structs.replace(CUDA, head_quantization="int8"), "quantization"),
        (structs.replace(CUDA, quantization="none", block_size=32), "block_size"),
        (structs.replace(PLANNED, quantization="int8"),
         "quantization"),
        (structs.replace(PLANNED, external_weights=True),
         "external_weights"),
    ],
)  # fmt: skip
def test_what_no_engine_of_a_gpu_takes_is_refused(options: ExportOptions, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        check_options(options)
    assert (caught.value.code, caught.value.field) == ("unsupported_option", field)


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def loader() -> Any:
    return pytest.importorskip("transformers").AutoModelForCausalLM


def live_logits(torch: Any, loader: Any, folder: Path, ids: list[int]) -> Any:
    model = loader.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.reference
@pytest.mark.parametrize("name", NAMES)
def test_stored_logits_are_those_of_transformers(torch: Any, loader: Any, name: str) -> None:
    row = reference_logits(name)[0]
    logits = live_logits(torch, loader, reference_folder(name), row.token_ids)
    np.testing.assert_allclose(logits, row.logits, atol=1e-5)


@pytest.mark.reference
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 32},
        {"num_attention_heads": 6, "head_dim": 10, "hidden_size": 36},
        {"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 40},
        {"attention_bias": True, "use_sliding_window": True, "max_window_layers": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_other_shapes_agree(
    torch: Any, tmp_path: Path, dialect: Any, kind: str, sizes: dict[str, int]
) -> None:
    family = pytest.importorskip("transformers")
    make = pytest.importorskip("tests.references.make")
    served = {"attention_bias"} if kind in ("Qwen2", "Mistral") else set[str]()
    given = {name: size for name, size in sizes.items() if name not in served}
    config = getattr(family, f"{kind}Config")(**{**make.SIZES, **given})
    recipe = make.Recipe(config, getattr(family, f"{kind}ForCausalLM"), 5, torch.float32)
    model = make.build(recipe, seed=1)
    make.write_model(tmp_path / "m", model, recipe, make.make_tokenizer())
    tensors, _ = make.run_rows(model, seed=1)
    rows = split_rows({name: value.numpy() for name, value in tensors.items()})
    export_model(tmp_path / "m", tmp_path / "engine", ExportOptions(dialect=dialect))
    driver = GraphDriver(tmp_path / "engine", len(rows), capacity=32)
    for row, logits in zip(rows, run_rows(driver, rows, 5), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.reference
@pytest.mark.parametrize("theta", [10_000.0, 5_000_000.0])
@pytest.mark.parametrize("name", ["qwen2", "llama3_scaled"])
def test_long_sequences_agree(
    torch: Any, loader: Any, tmp_path: Path, name: str, theta: float
) -> None:
    folder = copy_model(name, tmp_path / "m", rope_theta=theta)
    ids = np.random.default_rng(1).integers(0, 288, 500).tolist()
    expected = live_logits(torch, loader, folder, ids)
    export_model(folder, tmp_path / "engine", ExportOptions(prefill_chunk=64))
    driver = GraphDriver(tmp_path / "engine", 1, capacity=512)
    (logits,) = run_rows(driver, [ReferenceRow(ids, 480, expected)], chunk=64)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.reference
@pytest.mark.parametrize("factor", [1, -0.5])
def test_a_head_stored_beside_a_tied_table_agrees(
    torch: Any, loader: Any, tmp_path: Path, factor: float
) -> None:
    folder = copy_model("llama_linear", tmp_path / "m")
    change_tensors(folder, lambda one: one.update({HEAD: one[EMBEDDING] * np.float16(factor)}))
    ids = list(range(3, 20))
    expected = live_logits(torch, loader, folder, ids)
    export_model(folder, tmp_path / "engine", ExportOptions())
    driver = GraphDriver(tmp_path / "engine", 1, capacity=32)
    (logits,) = run_rows(driver, [ReferenceRow(ids, 9, expected)], chunk=8)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)
