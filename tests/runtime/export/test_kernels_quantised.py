"""Integers in the folder of an engine of kernels, of the shipped model."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.config import DType, Quantization
from hearth.runtime.engine_folder import verify_folder
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.layout import EMBEDDING
from hearth.runtime.export.rounded_weights import RoundedWeights
from hearth.runtime.known_answer import load_answer
from hearth.runtime.memory.sizes import projection_bytes
from hearth.runtime.weights.quantised import Kind, Quantised, unpack, widen
from hearth.runtime.weights.weights_file import WeightLayout, load_layout
from tests.references import reference_folder

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
