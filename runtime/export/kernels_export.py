"""The weights of an engine of Hearth's own kernels: as the checkpoint has them, in its type."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import (
    DRAFT_ARCHITECTURE,
    WEIGHTS_FILE,
    LLMEngineRunnerConfig,
    kernel_limits,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.draft_config import EMBEDDED_NORM, FUSED_NORM, FUSION, LAYER
from hearth.runtime.export.external_weights import facts_of
from hearth.runtime.export.layout import EMBEDDING as EMBEDDING_SOURCE
from hearth.runtime.export.layout import HEAD as HEAD_SOURCE
from hearth.runtime.export.model_config import ModelConfig
from hearth.runtime.export.weights import Kind, cast, pack, quantised_rows, row_pieces
from hearth.runtime.export.writer import DataFile
from hearth.runtime.memory.sizes import weights_head_bytes
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.weights.weights_file import (
    EMBEDDING,
    StoredType,
    WeightEntry,
    WeightLayout,
    write_layout,
)

HEAD = "head"
_STORED: dict[str, StoredType] = {"float16": "F16", "bfloat16": "BF16", "uint8": "U8"}
_MATRICES = {
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}


class Part(NamedTuple):
    """A tensor of the file; the pieces follow each other along the first axis."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Iterable[NDArray[Any]]


PartsOf = Callable[[str, str], Iterable[Part]]
"""Function to the parts of a tensor in the file, by its name there and in the checkpoint."""


def check_limits(config: LLMEngineRunnerConfig) -> None:
    """Raise `model_unsupported` naming the first size that kernels do not serve."""
    for wrong, name, what in kernel_limits(config):
        if wrong:
            whose = "of the draft " if config.architecture == DRAFT_ARCHITECTURE else ""
            raise HearthError(
                "model_unsupported",
                f"{name} {whose}{what} for Hearth's kernels: export with --backend onnxruntime",
                name,
            )


def refuse_biases(model: ModelConfig) -> None:
    """Raise `model_unsupported` naming the field of a bias that kernels do not add."""
    for name, has in (("attention_bias", model.output_bias), ("mlp_bias", model.mlp_bias)):
        if has:
            what = f"Hearth's kernels add no {name} of a {model.architecture} model"
            how = "export with --backend onnxruntime"
            raise HearthError("model_unsupported", f"{what}: {how}", name)


def write_kernels(
    folder: Path,
    model: ModelConfig,
    checkpoint: Checkpoint,
    config: LLMEngineRunnerConfig,
    written: Callable[[int], None],
) -> None:
    """Write an engine's weights, without their head, and the list of them."""
    parts = partial(kernel_parts, checkpoint=checkpoint, config=config)
    path = folder / WEIGHTS_FILE
    write_layout(folder, write_kernel_weights(path, model, parts, config, written))


def write_kernel_weights(
    path: Path,
    model: ModelConfig,
    parts: PartsOf,
    config: LLMEngineRunnerConfig,
    written: Callable[[int], None],
) -> WeightLayout:
    """Write the weights of a base or a draft without their head; their list.

    `written` gets the bytes of every piece.
    """
    names = kernel_tensors(model, draft=config.architecture == DRAFT_ARCHITECTURE)
    if HEAD not in names and config.head_weights != "none":
        names[HEAD] = EMBEDDING_SOURCE  # a copy of its own: tokens are looked up in 16 bits
    begin = weights_head_bytes(model.num_layers)
    tensors: dict[str, WeightEntry] = {}
    with path.open("wb") as file:
        file.seek(begin)
        # Tensors of a safetensors file lie side by side; all of these have whole 16 bytes.
        data = DataFile(file, written, 1)
        for name, source in names.items():
            for part in parts(name, source):
                place = data.append(part.pieces)
                tensors[part.name] = WeightEntry(_STORED[part.dtype.name], part.shape, *place)
    return WeightLayout(
        begin=begin,
        bound=True,
        head=HEAD if HEAD in names else EMBEDDING,
        tensors=tensors,
        model=facts_of(model),
    )


def kernel_tensors(model: ModelConfig, *, draft: bool = False) -> dict[str, str]:
    """The name of each tensor that kernels read, and what it is called in the checkpoint.

    A draft reads no embedding table; a tied head is the table itself, unless it is quantised.
    """
    if draft:
        first = {"embedded_norm": EMBEDDED_NORM, "fused_norm": FUSED_NORM}
        norms = {**first, "post_norm": f"{LAYER}.{_NORMS['post_norm']}"}
        return {
            "fc": f"{FUSION}.weight",
            **{f"layers.0.{name}": f"{source}.weight" for name, source in norms.items()},
            **_matrices(0, LAYER),
            "norm": "norm.weight",
            HEAD: HEAD_SOURCE,
        }
    names = {EMBEDDING: EMBEDDING_SOURCE}
    for layer in range(model.num_layers):
        place, prefix = f"layers.{layer}", f"model.layers.{layer}"
        names |= {f"{place}.{name}": f"{prefix}.{one}.weight" for name, one in _NORMS.items()}
        names |= _matrices(layer, prefix)
        if model.attention_bias:
            names |= {f"{place}.{n}_bias": f"{prefix}.self_attn.{n}_proj.bias" for n in "qkv"}
        if model.qk_norm:
            names |= {f"{place}.{n}_norm": f"{prefix}.self_attn.{n}_norm.weight" for n in "qk"}
    names["norm"] = "model.norm.weight"
    return names if model.tied_head else {**names, HEAD: HEAD_SOURCE}


def _matrices(layer: int, prefix: str) -> dict[str, str]:
    return {
        f"layers.{layer}.{name}": f"{prefix}.{source}.weight" for name, source in _MATRICES.items()
    }


def kernel_parts(
    name: str, source: str, checkpoint: Checkpoint, config: LLMEngineRunnerConfig
) -> Iterator[Part]:
    """Yield the parts of the file for one tensor of the checkpoint."""
    dtype, shape = numpy_dtype(config.dtype), checkpoint.shape(source)
    if len(shape) == 1:
        yield Part(name, dtype, shape, [cast(checkpoint.vector(source), dtype, source)])
        return
    rows, columns = shape
    kind = config.head_weights if name == HEAD else config.weight_quantization
    if kind == "none" or name == EMBEDDING:
        yield Part(name, dtype, shape, row_pieces(checkpoint, source, (rows, columns), dtype))
        return
    scales: list[NDArray[Any]] = []
    form = (kind, config.weight_block_size, dtype)
    integers = (rows, columns // 2 if kind == "int4" else columns)
    pieces = _integers(checkpoint, source, form, scales)
    yield Part(name, np.dtype(np.uint8), integers, pieces)
    # They are there once all pieces of the integers are written.
    yield Part(f"{name}.scale", dtype, (rows, columns // config.weight_block_size), scales)


def _integers(
    checkpoint: Checkpoint,
    source: str,
    form: tuple[Kind, int, np.dtype[Any]],
    scales: list[NDArray[Any]],
) -> Iterator[NDArray[Any]]:
    """Pieces of a matrix in integers; appends their scales to `scales`."""
    for made in quantised_rows(checkpoint, source, *form):
        scales.append(made.scales)
        yield pack(made.integers) if made.kind == "int4" else made.integers
