"""The folder of the vision variant: Qwen3-VL's configuration, its processor and its tokenizer."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from models.folder import CONFIG as TEXT
from models.folder import GENERATION, TOKENIZER
from models.vision.rows import IMAGE, TOKENS, VIDEO, VISION_END, VISION_START

TEMPLATE: Final = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
_TEXT_FIELDS: Final = (
    "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim",
    "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
    "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "pad_token_id", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "use_cache", "vocab_size",
)  # fmt: skip
_SIZE: Final = {"shortest_edge": 96 * 96, "longest_edge": 224 * 224}  # areas, in pixels
_PROCESSOR: Final[dict[str, Any]] = {
    "size": _SIZE,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}


def config_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json, as Qwen3-VL's published folders write it."""
    rope = {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "model_type": "qwen3_vl",
        "text_config": {
            **{name: TEXT[name] for name in _TEXT_FIELDS},
            "dtype": "bfloat16",
            "model_type": "qwen3_vl_text",
            "rope_scaling": rope,
        },
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "video_token_id": tokenizer.token_to_id(VIDEO),
        "vision_config": {
            "deepstack_visual_indexes": [1, 3],
            "depth": 6,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 128,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 256,
            "model_type": "qwen3_vl",
            "num_heads": 4,
            "num_position_embeddings": 196,
            "out_hidden_size": TEXT["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": tokenizer.token_to_id(VISION_END),
        "vision_start_token_id": tokenizer.token_to_id(VISION_START),
    }


def new_model(text: Path, tokenizer: Tokenizer) -> Qwen3VLForConditionalGeneration:
    """Return the text model of a folder with an untrained tower, in float32."""
    fields = config_of(tokenizer)
    for known in ("architectures", "model_type", "torch_dtype"):
        fields.pop(known)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**fields)).float()
    weights = {
        name.replace("model.", "model.language_model.", 1): tensor.float()
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    table = weights["model.language_model.embed_tokens.weight"]
    start, end = (tokenizer.token_to_id(token) for token in (VISION_START, VISION_END))
    table[[start, end]] = torch.randn(2, table.shape[1]) * table.std()
    rest = model.load_state_dict(weights, strict=False)
    untrained = [n for n in rest.missing_keys if not n.startswith(("model.visual", "lm_head"))]
    if rest.unexpected_keys or untrained:
        raise ValueError(f"the weights do not fit: {rest}")
    model.tie_weights()
    return model


def load_weights(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """Put the weights of a folder into the model."""
    weights = {n: w.float() for n, w in load_file(folder / "model.safetensors").items()}
    rest = model.load_state_dict(weights, strict=False)
    if rest.unexpected_keys or set(rest.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"the weights do not fit: {rest}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_folder(out: Path, model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer) -> None:
    """Write everything that a loader needs, with the weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(out / "config.json", config_of(tokenizer))
    _write_json(out / "generation_config.json", GENERATION)
    special = [*TOKENIZER["additional_special_tokens"], *TOKENS]
    extra = {"additional_special_tokens": special, "processor_class": "Qwen3VLProcessor"}
    _write_json(out / "tokenizer_config.json", {**TOKENIZER, **extra})
    image = {**_PROCESSOR, "image_processor_type": "Qwen2VLImageProcessorFast"}
    _write_json(out / "preprocessor_config.json", image)
    video = {**_PROCESSOR, "video_processor_type": "Qwen3VLVideoProcessor"}
    _write_json(out / "video_preprocessor_config.json", video)
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, out / "model.safetensors", {"format": "pt"})
