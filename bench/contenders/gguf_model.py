"""Conversion of a Qwen3 folder to GGUF, so that llama.cpp runs the very same weights."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ml_dtypes  # noqa: F401 - lets NumPy, and so safetensors, know bfloat16
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from runtime.errors import HearthError

GGUFType = Literal["F32", "Q8_0", "Q4_0"]

# Hugging Face names on the left (layer tensors without their prefix), GGUF names on the right.
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def gguf_name(name: str) -> str:
    """The GGUF name of a Qwen3 tensor; raises `model_unsupported` for any other tensor."""
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"blk.{match[1]}.{_LAYER[match[2]]}.weight"
    if name in _TOP:
        return _TOP[name]
    raise HearthError("model_unsupported", f"tensor {name} has no place in a Qwen3 GGUF", name)


def write_gguf(
    source: Path,
    target: Path,
    kind: GGUFType,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Convert a Qwen3 folder; every matrix becomes `kind`, the tied embedding and head included.

    Vectors stay F32, as llama.cpp wants them. Two passes, one tensor in memory at a time.
    `progress` gets (tensors written, tensors in all). The file appears only when it is whole.
    """
    import gguf  # noqa: PLC0415 - a peer's library, present after `make bench-env` only

    quantisation = gguf.GGMLQuantizationType[kind]
    unfinished = target.with_name(target.name + ".partial")
    writer = gguf.GGUFWriter(unfinished, "qwen3")
    config = json.loads((source / "config.json").read_text())
    _add_metadata(writer, config, gguf.LlamaFileType[_FILE_TYPE[kind]])
    shapes = {gguf_name(name): shape for name, shape, _ in _tensors(source)}
    for name, shape in shapes.items():
        _announce(writer, name, shape, quantisation, gguf.GGML_QUANT_SIZES[quantisation])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (_, _, load) in enumerate(_tensors(source), start=1):
        values = load().astype(np.float32)
        writer.write_tensor_data(
            values if values.ndim == 1 else gguf.quantize(values, quantisation)
        )
        if progress:
            progress(number, len(shapes))
    writer.close()
    unfinished.rename(target)


_FILE_TYPE = {"F32": "ALL_F32", "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0"}


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
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("none")


def _rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or config
    return float(parameters["rope_theta"])


def _tensors(
    source: Path,
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], NDArray[Any]]]]:
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
