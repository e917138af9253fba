import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hearth.runtime.config import Quantization
from hearth.runtime.engine_folder import MODEL_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model, reference_pass, weights
from hearth.runtime.export.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from hearth.runtime.export.engine_files import engine_config
from hearth.runtime.export.layout import EMBEDDING, check_tensors
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.reference_pass import RoundedWeights
from hearth.runtime.export.weights import (
    MIDDLE,
    Kind,
    Quantised,
    pack,
    round_weights,
    unpack,
    widen,
)
from tests.references import reference_folder, reference_logits
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.hugging_face import Tensors, change_tensors, copy_model

PREFIX = "model.layers.1.self_attn"


def initializers(folder: Path) -> dict[str, NDArray[Any]]:
    values = ir.load(folder / MODEL_FILE).graph.initializers.values()
    return {str(v.name): v.const_value.numpy() for v in values if v.const_value is not None}


def source_matrix(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    return checkpoint.matrix(name, slice(None), slice(None)).astype(np.float32)


def test_projections_are_joined_side_by_side_and_transposed(tmp_path: Path) -> None:
    export_model(reference_folder("qwen3_untied"), tmp_path / "engine", ExportOptions())
    checkpoint = Checkpoint(reference_folder("qwen3_untied"))
    parts = [source_matrix(checkpoint, f"{PREFIX}.{kind}_proj.weight") for kind in "qkv"]
    stored = initializers(tmp_path / "engine")
    np.testing.assert_array_equal(stored["layers.1/qkv"], np.concatenate(parts).T)
    head = source_matrix(checkpoint, "lm_head.weight")
    np.testing.assert_array_equal(stored["head"], head.T)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_size_of_a_slab_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: Quantization
) -> None:
    block_size = 0 if quantization == "none" else 16
    options = ExportOptions(quantization=quantization, block_size=block_size)
    whole = export_model(reference_folder("qwen2"), tmp_path / "whole", options)
    monkeypatch.setattr(weights, "SLAB_BYTES", 5000)
    monkeypatch.setattr(weights, "TILE_BYTES", 500)
    pieces = export_model(reference_folder("qwen2"), tmp_path / "pieces", options)
    assert pieces.files == whole.files


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_logits_equal_those_of_the_weights_they_stand_for(
    tmp_path: Path, dialect: Any, quantization: Kind
) -> None:
    rounded = copy_model("llama", tmp_path / "rounded")
    change_tensors(rounded, lambda tensors: round_projections(tensors, quantization))
    options = ExportOptions(dialect=dialect)
    export_model(rounded, tmp_path / "float", options)
    options = ExportOptions(dialect=dialect, quantization=quantization, head_quantization="body")
    export_model(reference_folder("llama"), tmp_path / "quantised", options)
    rows = reference_logits("llama")
    exact, ours = (
        run_rows(GraphDriver(tmp_path / kind, len(rows), capacity=32), rows, chunk=8)
        for kind in ("float", "quantised")
    )
    for logits, expected in zip(ours, exact, strict=True):
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def round_projections(tensors: Tensors, kind: Kind) -> None:
    wide = np.dtype(np.float32)
    for name, matrix in tensors.items():
        if "embed" in name:
            # Beside quantised weights the table has 16 bits.
            tensors[name] = matrix.astype(np.float16).astype(wide)
        elif matrix.ndim == 2:
            tensors[name] = widen(round_weights(matrix, kind, 32, wide), wide)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_head_of_a_tied_model_is_quantised_and_its_table_is_not(
    tmp_path: Path, quantization: Quantization
) -> None:
    export_model(
        reference_folder("qwen3"),
        tmp_path / "engine",
        ExportOptions(quantization=quantization, head_quantization="body"),
    )
    head = ir.load(tmp_path / "engine" / MODEL_FILE).graph.initializers["head"]
    assert head.dtype == ir.DataType[quantization.upper()]
    driver = GraphDriver(tmp_path / "engine", 1, capacity=8)
    original = source_matrix(Checkpoint(reference_folder("qwen3")), "model.embed_tokens.weight")
    np.testing.assert_array_equal(driver.table, original)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"],
)
def test_a_weight_that_is_not_finite_in_the_target_type_is_named(
    tmp_path: Path, name: str, value: float
) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[name].reshape(-1)[-1] = value

    folder = copy_model("qwen3", tmp_path / "model")
    change_tensors(folder, spoil)
    with pytest.raises(HearthError) as caught:
        export_model(folder, tmp_path / "engine", ExportOptions(dtype="float16"))
    assert (caught.value.code, caught.value.field) == ("model_invalid", name)


def test_float32_weights_that_float16_cannot_hold_are_named(tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    folder = copy_model("llama", tmp_path / "model")
    change_tensors(folder, lambda tensors: tensors[name].fill(1e5))
    with pytest.raises(HearthError) as caught:
        export_model(folder, tmp_path / "engine", ExportOptions(dtype="float16"))
    assert (caught.value.code, caught.value.field) == ("model_invalid", name)


OUTPUT = "model.layers.1.self_attn.o_proj.weight"
OPTIONS = [
    ExportOptions(),
    ExportOptions(dtype="float16"),
    ExportOptions(quantization="int8"),
    ExportOptions(quantization="int4", block_size=16),
    ExportOptions(dtype="float16", quantization="int8"),
]


def opened(options: ExportOptions) -> RoundedWeights:
    folder = reference_folder("llama")
    return RoundedWeights(Checkpoint(folder), engine_config(load_model_config(folder), options))


def held(stored: dict[str, NDArray[Any]], name: str) -> NDArray[np.float32]:
    """A projection [in, out] of an engine's graph, widened."""
    weights = stored[name].astype(np.float32)
    if f"{name}_scale" not in stored:
        return weights
    scales = stored[f"{name}_scale"].astype(np.float32)
    return weights * np.repeat(scales, len(weights) // len(scales), axis=0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tile", [1, 500, 1 << 20])
def test_projections_have_the_numbers_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: ExportOptions, tile: int
) -> None:
    monkeypatch.setattr(reference_pass, "TILE_BYTES", tile)
    export_model(reference_folder("llama"), tmp_path / "engine", options)
    stored = initializers(tmp_path / "engine")
    eye = np.eye(64, dtype=np.float32)
    np.testing.assert_array_equal(
        opened(options).project(eye, OUTPUT), held(stored, "layers.1/output")
    )
    np.testing.assert_array_equal(
        opened(options).vector("model.norm.weight"), stored["model.norm"].astype(np.float32)
    )


def test_embedded_tokens_are_rows_of_the_table() -> None:
    whole = Checkpoint(reference_folder("llama")).matrix(EMBEDDING, slice(None), slice(None))
    embedded = opened(ExportOptions(dtype="float16")).embed(EMBEDDING, [[5, 287], [5, 0]])
    np.testing.assert_array_equal(embedded, whole[[[5, 287], [5, 0]]].astype(np.float16))
    assert embedded.dtype == np.float32


def test_inputs_of_products_round_as_their_types_do() -> None:
    x = np.random.default_rng(3).standard_normal((2, 3, 32)).astype(np.float32)
    half = opened(ExportOptions(dtype="float16")).rounded_inputs(x)
    np.testing.assert_array_equal(half, x.astype(np.float16).astype(np.float32))
    blocks = opened(ExportOptions(quantization="int4", block_size=16)).rounded_inputs(x)
    steps = np.abs(x).reshape(2, 3, 2, 16).max(axis=-1, keepdims=True) / 127
    assert blocks.shape == x.shape
    assert not np.array_equal(blocks, x)
    off = np.abs(blocks - x).reshape(2, 3, 2, 16)
    assert (off <= steps * 0.501).all()
    np.testing.assert_array_equal(opened(ExportOptions()).rounded_inputs(x), x)


SHARD = "model-00002-of-00003.safetensors"
NORM = "model.norm.weight"


def fault(folder: Path) -> tuple[str, str | None]:
    with pytest.raises(HearthError) as caught:
        check_tensors(Checkpoint(folder), load_model_config(folder))
    return caught.value.code, caught.value.field


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_pieces_of_every_source_type(tmp_path: Path, dtype: Any) -> None:
    matrix = np.arange(24).reshape(6, 4).astype(dtype)
    save_file({"m": matrix, "v": matrix[0].copy()}, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.dtype("m") == dtype
    whole = slice(None)
    np.testing.assert_array_equal(checkpoint.matrix("m", slice(2, 5), whole), matrix[2:5])
    np.testing.assert_array_equal(checkpoint.matrix("m", whole, slice(1, 3)), matrix[:, 1:3])
    assert checkpoint.shape("m")[0] == 6
    np.testing.assert_array_equal(checkpoint.vector("v"), matrix[0])


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_a_type_that_numpy_has_not_is_named(tmp_path: Path, dtype: str) -> None:
    entry = {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}
    header = json.dumps({"v": entry}).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(HearthError, match=dtype) as caught:
        Checkpoint(tmp_path).vector("v")
    assert (caught.value.code, caught.value.field) == ("model_invalid", "v")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m")
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data[:-10])
    assert fault(folder) == ("model_invalid", SINGLE_FILE)


@pytest.mark.parametrize("keep", [0, 4, 100])
def test_a_truncated_shard_is_named(tmp_path: Path, keep: int) -> None:
    folder = copy_model("qwen3_untied", tmp_path / "m")
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:keep])
    assert fault(folder) == ("model_invalid", SHARD)


@pytest.mark.parametrize(("name", "file"), [("qwen3_untied", SHARD), ("llama", SINGLE_FILE)])
def test_a_missing_file_is_named(tmp_path: Path, name: str, file: str) -> None:
    folder = copy_model(name, tmp_path / "m")
    (folder / file).unlink()
    assert fault(folder) == ("model_invalid", file)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m")
    change_tensors(folder, lambda tensors: tensors.__delitem__(NORM))
    assert fault(folder) == ("model_invalid", NORM)


def test_a_tensor_that_the_index_promises_and_its_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = copy_model("qwen3_untied", tmp_path / "m")
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"]["model.extra.weight"] = SHARD
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert fault(folder) == ("model_invalid", "model.extra.weight")


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "..", 7, ["a"]])
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, place: Any) -> None:
    folder = copy_model("qwen3_untied", tmp_path / "m")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {NORM: place}}))
    assert fault(folder) == ("model_invalid", INDEX_FILE)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_an_index_without_tensors_is_refused(tmp_path: Path, index: Any) -> None:
    folder = copy_model("qwen3_untied", tmp_path / "m")
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert fault(folder) == ("model_invalid", INDEX_FILE)


WIDE = np.dtype(np.float32)
DTYPES = (WIDE, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
KINDS: tuple[Kind, ...] = ("int8", "int4")
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 5), st.sampled_from([16, 32, 64, 128, 256]))


def random_weights(
    seed: int, sizes: tuple[int, int, int], scale: float = 1.0
) -> NDArray[np.float32]:
    rows, blocks, block = sizes
    drawn = np.random.default_rng(seed).standard_normal((rows, blocks * block)) * scale
    return drawn.astype(np.float32)


def squared_errors(
    matrix: Quantised, weights: NDArray[np.float32], block: int
) -> NDArray[np.float32]:
    off = (widen(matrix, WIDE) - weights).reshape(len(weights), -1, block)
    errors: NDArray[np.float32] = np.square(off).sum(axis=-1)
    return errors


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=SIZES,
    kind=st.sampled_from(KINDS),
    size=st.floats(1e-6, 1e6),
    signed=st.booleans(),
)
def test_the_error_is_at_most_a_step_of_the_block(
    seed: int, sizes: tuple[int, int, int], kind: Kind, size: float, *, signed: bool
) -> None:
    weights = random_weights(seed, sizes, size)
    made = round_weights(weights, kind, sizes[2], WIDE, signed=signed)
    assert made.integers.shape == weights.shape
    assert made.scales.shape == sizes[:2]
    assert signed or (made.scales > 0).all()
    assert made.integers.max() < 2 * MIDDLE[kind]
    steps = np.abs(np.repeat(made.scales, sizes[2], axis=1))
    # What a scale of four bits clips is off by more, as it is fitted to the others.
    limit = 0.501 if kind == "int8" else 3
    assert (np.abs(widen(made, WIDE) - weights) <= steps * limit).all()


@given(seed=st.integers(0, 2**32 - 1), sizes=SIZES, signed=st.booleans())
def test_no_block_of_four_bits_is_worse_than_by_its_largest_magnitude(
    seed: int, sizes: tuple[int, int, int], *, signed: bool
) -> None:
    weights, block = random_weights(seed, sizes), sizes[2]
    made = round_weights(weights, "int4", block, WIDE, signed=signed)
    largest = np.abs(weights.reshape(*sizes)).max(axis=-1)
    steps = np.repeat(largest / np.float32(7), block, axis=1)
    plain = np.square(np.rint(weights / steps) * steps - weights).reshape(*sizes).sum(axis=-1)
    assert (squared_errors(made, weights, block) <= plain * 1.0001).all()


def test_scales_of_both_signs_fit_better() -> None:
    weights = random_weights(5, (64, 16, 32))
    errors = [
        squared_errors(round_weights(weights, "int4", 32, WIDE, signed=signed), weights, 32).sum()
        for signed in (False, True)
    ]
    assert errors[1] < 0.92 * errors[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_are_those_of_the_scale_as_it_is_stored(kind: Kind, dtype: np.dtype[Any]) -> None:
    weights = random_weights(7, (5, 3, 64))
    made = round_weights(weights, kind, 64, dtype, signed=True)
    assert made.scales.dtype == dtype
    steps = np.repeat(made.scales.astype(np.float32), 64, axis=1)
    middle = MIDDLE[kind]
    nearest = np.clip(np.rint(weights / steps), -middle, middle - 1) + middle
    assert (np.abs(nearest - made.integers) <= (np.abs(weights / steps % 1 - 0.5) < 1e-5)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("signed", [False, True])
def test_a_block_of_zeros_stays_zero(kind: Kind, *, signed: bool) -> None:
    made = round_weights(np.zeros((2, 32), np.float32), kind, 32, WIDE, signed=signed)
    assert (made.integers == MIDDLE[kind]).all()
    assert not made.scales.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-37, 1e-9])
def test_the_smallest_numbers_become_as_small(
    kind: Kind, dtype: np.dtype[Any], size: float
) -> None:
    made = round_weights(np.full((1, 32), size, np.float32), kind, 32, dtype)
    assert np.isfinite(made.scales.astype(np.float32)).all()
    assert np.abs(widen(made, WIDE)).max() <= 2 * size


def test_a_scale_that_its_type_cannot_hold_is_infinite() -> None:
    made = round_weights(np.full((1, 32), 1e9, np.float32), "int8", 32, np.dtype(np.float16))
    assert np.isinf(made.scales).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_zeros", [False, True])
def test_a_weight_is_integer_less_zero_point_times_scale_rounded_once(
    kind: Kind, dtype: np.dtype[Any], *, with_zeros: bool
) -> None:
    rng, most = np.random.default_rng(3), 2 * MIDDLE[kind]
    integers = rng.integers(0, most, (3, 96), np.uint8)
    scales = rng.standard_normal((3, 3)).astype(dtype)
    zeros = rng.integers(0, most, (3, 3), np.uint8) if with_zeros else None
    wide = widen(Quantised(kind, integers, scales, zeros), dtype)
    assert wide.dtype == dtype
    for row, column in np.ndindex(3, 96):
        block = (row, column // 32)
        zero = MIDDLE[kind] if zeros is None else int(zeros[block])
        exact = (int(integers[row, column]) - zero) * float(scales[block])
        assert wide[row, column] == np.array(exact).astype(dtype)


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(1, 33))
def test_packed_integers_come_back(seed: int, rows: int, pairs: int) -> None:
    integers = np.random.default_rng(seed).integers(0, 16, (rows, 2 * pairs), np.uint8)
    packed = pack(integers)
    assert packed.shape == (rows, pairs)
    np.testing.assert_array_equal(unpack(packed), integers)


def test_the_first_of_two_fills_the_low_half() -> None:
    assert pack(np.array([1, 15, 7, 9], np.uint8)).tolist() == [0xF1, 0x97]
