"""Conversion of a Qwen3 folder to GGUF, so that llama.cpp runs the very same weights."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from hearth.runtime.errors import HearthError

GGUFType = Literal["F32", "F16", "BF16", "Q8_0", "Q4_0"]

_FILE_TYPE = {
    "F32": "ALL_F32",
    "F16": "MOSTLY_F16",
    "BF16": "MOSTLY_BF16",
    "Q8_0": "MOSTLY_Q8_0",
    "Q4_0": "MOSTLY_Q4_0",
}
_PART_VALUES = 1 << 20


Named = tuple[str, tuple[int, ...], Callable[[], NDArray[Any]]]
"""Name, shape and loader of a tensor."""


def write_gguf(
    source: Path,
    target: Path,
    kind: GGUFType,
    progress: Callable[[int, int], None] | None = None,
    tensors: Callable[[], Iterable[Named]] | None = None,
) -> None:
    """Convert a Qwen3 folder; every matrix becomes `kind`, the tied embedding and head included.

    `tensors` stand in for those of the folder, which then has a configuration alone; bytes are
    written as they are. Vectors stay F32, as llama.cpp wants them. Two passes, one tensor in memory
    at a time. `progress` gets (tensors written, tensors in all). The file appears only when it is
    whole.
    """
    import gguf  # noqa: PLC0415 - a peer's library, present after `make bench-env` only

    quantisation = gguf.GGMLQuantizationType[kind]
    unfinished = target.with_name(target.name + ".partial")
    writer = gguf.GGUFWriter(unfinished, "qwen3")
    config = json.loads((source / "config.json").read_text())
    _add_metadata(writer, config, gguf.LlamaFileType[_FILE_TYPE[kind]])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    tensors = tensors or partial(_tensors, source)
    shapes = {gguf_name(names, name): shape for name, shape, _ in tensors()}
    for name, shape in shapes.items():
        _announce(writer, name, shape, quantisation, gguf.GGML_QUANT_SIZES[quantisation])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, (_, _, load) in enumerate(tensors(), start=1):
            values = load()
            if values.dtype == np.uint8:
                writer.write_tensor_data(values)
            elif values.ndim == 1:
                writer.write_tensor_data(values.astype(np.float32))
            else:
                parts = np.array_split(values, -(-values.size // _PART_VALUES))
                stored = pool.map(lambda part: gguf.quantize(_wide(part), quantisation), parts)
                writer.write_tensor_data(np.concatenate(list(stored)))
            if progress:
                progress(number, len(shapes))
    writer.close()
    unfinished.rename(target)


def gguf_name(names: Any, name: str) -> str:
    """The GGUF name of a Qwen3 tensor, by GGUF's own map; raises `model_unsupported` for others."""
    found: str | None = names.get_name(name, (".weight",))
    if found is None:
        raise HearthError("model_unsupported", f"tensor {name} has no place in a Qwen3 GGUF", name)
    return found


def _wide(values: NDArray[Any]) -> NDArray[np.float32]:
    """The same numbers in float32; those of bfloat16 by a shift, which threads can do at once."""
    if values.dtype != ml_dtypes.bfloat16:
        return values.astype(np.float32)
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _add_metadata(writer: Any, config: dict[str, Any], file_type: int) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float((config.get("rope_parameters") or config)["rope_theta"]))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("none")


def _tensors(source: Path) -> Iterator[Named]:
    """Name, shape and loader of every tensor; a head that is tied to the embedding is left out."""
    tied = json.loads((source / "config.json").read_text()).get("tie_word_embeddings", False)
    for shard in sorted(source.glob("*.safetensors")):
        with safe_open(shard, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                if not (tied and name == "lm_head.weight"):
                    shape = tuple(file.get_slice(name).get_shape())
                    yield name, shape, partial(file.get_tensor, name)


def _announce(
    writer: Any, name: str, shape: tuple[int, ...], kind: Any, sizes: tuple[int, int]
) -> None:
    if len(shape) == 1:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        return
    block, size = sizes
    rows, row_bytes = shape[0], shape[1] // block * size
    writer.add_tensor_info(
        name, (rows, row_bytes), np.dtype(np.uint8), rows * row_bytes, raw_dtype=kind
    )
