"""Small random models that see, as Hugging Face folders: three families in two spellings each.

They are written without torch, so that every test may have one; `tests/test_vision_models.py` lets
transformers read them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.vision_processors import TEMPLATES, processor_files

Family = Literal["qwen3_vl", "qwen2_5_vl", "idefics3"]
Spelling = Literal["published", "saved"]
FAMILIES: tuple[Family, ...] = ("qwen3_vl", "qwen2_5_vl", "idefics3")
SPELLINGS: tuple[Spelling, ...] = ("published", "saved")
QWEN_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
IDEFICS_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>",
    "<global-img>", *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)  # fmt: skip
VOCABULARY = 320
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "in_channels": 3,
    "out_hidden_size": 64,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
VISION: dict[Family, dict[str, Any]] = {
    "qwen3_vl": {
        **_QWEN_VISION,
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    },
    "qwen2_5_vl": {
        **_QWEN_VISION,
        "hidden_act": "silu",
        "window_size": 32,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    },
    "idefics3": {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "image_size": 32,
        "patch_size": 8,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}
_SECTIONS = [4, 2, 2]
_SCALE_FACTOR = 2
Tensors = dict[str, NDArray[Any]]


def write_vision_model(
    folder: Path,
    family: Family,
    spelling: Spelling = "published",
    *,
    seed: int = 0,
    dtype: Any = np.float32,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> Path:
    """Write a model into `folder`, which is returned; `text` and `vision` change its sizes.

    `published` is how such models lie on the hub, `saved` how later versions of transformers write
    them.
    """
    folder.mkdir(parents=True)
    changed_text, changed_vision = TEXT | (text or {}), VISION[family] | (vision or {})
    config = _spell_config(family, spelling, changed_text, changed_vision)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {
        _spell_name(name, family, spelling): value.astype(dtype)
        for name, value in _tensors(family, changed_text, changed_vision, seed).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    make_tokenizer(family).save(str(folder / "tokenizer.json"), pretty=False)
    files = processor_files(family, spelling, changed_vision)
    files["tokenizer_config.json"] = {
        "eos_token": _tokens(family)[2],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files["generation_config.json"] = {"eos_token_id": [2, 0]}
    if spelling == "saved":
        (folder / "chat_template.jinja").write_text(TEMPLATES[family])
    else:
        files["chat_template.json"] = {"chat_template": TEMPLATES[family]}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    return folder


def make_tokenizer(family: Family) -> Tokenizer:
    """A byte-level BPE tokenizer whose special tokens have the lowest ids, in their order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in _tokens(family)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the red lamp stands left of the open door"] * 4, trainer)
    return tokenizer


def _tokens(family: Family) -> tuple[str, ...]:
    return IDEFICS_TOKENS if family == "idefics3" else QWEN_TOKENS


def _spell_config(
    family: Family, spelling: Spelling, text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    """config.json; Qwen2.5-VL has its text's fields at the top as published."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if family != "idefics3":
        rope["mrope_section"] = _SECTIONS
    if family == "qwen3_vl":
        rope["mrope_interleaved"] = True
    published = spelling == "published"
    if not published:
        text = {**text, "rope_parameters": {**rope, "rope_theta": 10_000.0}, "dtype": "float32"}
    elif family == "idefics3":
        text = {**text, "rope_theta": 10_000.0, "torch_dtype": "float32"}
    else:
        if family == "qwen2_5_vl":
            rope = {"type": "mrope", "mrope_section": _SECTIONS}
        text = {**text, "rope_theta": 10_000.0, "rope_scaling": rope, "torch_dtype": "float32"}
    head = {"tie_word_embeddings": family == "qwen3_vl"}
    if family == "idefics3":
        kind = "idefics3" if published else "smolvlm"
        return {
            "architectures": [f"{'Idefics3' if published else 'SmolVLM'}ForConditionalGeneration"],
            "model_type": kind,
            "image_token_id": 4,
            "scale_factor": _SCALE_FACTOR,
            **head,
            "text_config": {"model_type": "llama", **text, **head},
            "vision_config": {"model_type": kind if published else f"{kind}_vision", **vision},
        }
    name = "Qwen3VL" if family == "qwen3_vl" else "Qwen2_5_VL"
    config: dict[str, Any] = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": family,
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
        "image_token_id": 5,
        "video_token_id": 6,
        **head,
        "vision_config": {"model_type": f"{family}_vision", **vision},
    }
    if family == "qwen2_5_vl" and published:
        vision = {key: value for key, value in vision.items() if key != "in_channels"}
        published_vision = {**vision, "in_chans": 3, "spatial_patch_size": vision["patch_size"]}
        return {**config, **text, "vision_token_id": 4, "vision_config": published_vision}
    if published:
        config["vision_config"]["model_type"] = family
    return {**config, "text_config": {"model_type": f"{family}_text", **text}}


def _spell_name(name: str, family: Family, spelling: Spelling) -> str:
    """`name` is that of transformers' own modules."""
    if family == "qwen2_5_vl" and spelling == "published":
        name = name.replace("model.language_model.", "model.")
        return name.replace("model.visual.", "visual.")
    return name


def _tensors(family: Family, text: dict[str, Any], vision: dict[str, Any], seed: int) -> Tensors:
    random = np.random.default_rng(seed)
    shapes = dict(_text_shapes(family, text))
    shapes |= dict(_idefics_shapes(text, vision) if family == "idefics3" else
                   _qwen_shapes(family, vision))  # fmt: skip
    return {name: _values(name, shape, random) for name, shape in shapes.items()}


def _values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    """Weights that are neither so small that outputs vanish, nor so large that they run away."""
    if name.endswith("bias"):
        values = random.standard_normal(shape) * 0.2
    elif len(shape) == 1:
        values = random.uniform(0.5, 1.5, shape)
    elif "embed_tokens" in name or "pos_embed" in name or "position_embedding" in name:
        values = random.standard_normal(shape) * 0.5
    else:
        values = random.standard_normal(shape) * np.prod(shape[1:]) ** -0.5
    return values.astype(np.float32)


def _linear(name: str, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _text_shapes(family: Family, text: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    sizes = {"q": text["num_attention_heads"] * head, "k": text["num_key_value_heads"] * head}
    sizes["v"] = sizes["k"]
    prefix = "model.text_model" if family == "idefics3" else "model.language_model"
    yield f"{prefix}.embed_tokens.weight", (text["vocab_size"], hidden)
    yield f"{prefix}.norm.weight", (hidden,)
    if family != "qwen3_vl":
        yield "lm_head.weight", (text["vocab_size"], hidden)
    for layer in range(text["num_hidden_layers"]):
        name = f"{prefix}.layers.{layer}"
        for kind, size in sizes.items():
            yield f"{name}.self_attn.{kind}_proj.weight", (size, hidden)
            if family == "qwen2_5_vl":
                yield f"{name}.self_attn.{kind}_proj.bias", (size,)
            if family == "qwen3_vl" and kind != "v":
                yield f"{name}.self_attn.{kind}_norm.weight", (head,)
        yield f"{name}.self_attn.o_proj.weight", (hidden, sizes["q"])
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield f"{name}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, inner)


def _qwen_shapes(family: Family, vision: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, output = (
        vision[name] for name in ("hidden_size", "intermediate_size", "out_hidden_size")
    )
    side, merged = vision["patch_size"], hidden * vision["spatial_merge_size"] ** 2
    newer, visual = family == "qwen3_vl", "model.visual"
    patch = (hidden, vision["in_channels"], vision["temporal_patch_size"], side, side)
    yield f"{visual}.patch_embed.proj.weight", patch
    if newer:
        yield f"{visual}.patch_embed.proj.bias", (hidden,)
        yield f"{visual}.pos_embed.weight", (vision["num_position_embeddings"], hidden)
    for layer in range(vision["depth"]):
        name = f"{visual}.blocks.{layer}"
        yield from _linear(f"{name}.attn.qkv", hidden, 3 * hidden)
        yield from _linear(f"{name}.attn.proj", hidden, hidden)
        for norm in ("norm1", "norm2"):
            both = list(_norm(f"{name}.{norm}", hidden))
            yield from both if newer else both[:1]
        if newer:
            yield from _linear(f"{name}.mlp.linear_fc1", hidden, inner)
            yield from _linear(f"{name}.mlp.linear_fc2", inner, hidden)
        else:
            yield from _linear(f"{name}.mlp.gate_proj", hidden, inner)
            yield from _linear(f"{name}.mlp.up_proj", hidden, inner)
            yield from _linear(f"{name}.mlp.down_proj", inner, hidden)
    if not newer:
        yield f"{visual}.merger.ln_q.weight", (hidden,)
        yield from _linear(f"{visual}.merger.mlp.0", merged, merged)
        yield from _linear(f"{visual}.merger.mlp.2", merged, output)
        return
    mergers = [f"deepstack_merger_list.{i}" for i in range(len(vision["deepstack_visual_indexes"]))]
    for name in ("merger", *mergers):
        yield from _norm(f"{visual}.{name}.norm", hidden if name == "merger" else merged)
        yield from _linear(f"{visual}.{name}.linear_fc1", merged, merged)
        yield from _linear(f"{visual}.{name}.linear_fc2", merged, output)


def _idefics_shapes(
    text: dict[str, Any], vision: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, side = (
        vision[name] for name in ("hidden_size", "intermediate_size", "patch_size")
    )
    tower, merged = "model.vision_model", hidden * _SCALE_FACTOR**2
    yield f"{tower}.embeddings.patch_embedding.weight", (hidden, 3, side, side)
    yield f"{tower}.embeddings.patch_embedding.bias", (hidden,)
    positions = (vision["image_size"] // side) ** 2
    yield f"{tower}.embeddings.position_embedding.weight", (positions, hidden)
    for layer in range(vision["num_hidden_layers"]):
        name = f"{tower}.encoder.layers.{layer}"
        for kind in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{name}.self_attn.{kind}", hidden, hidden)
        yield from _norm(f"{name}.layer_norm1", hidden)
        yield from _norm(f"{name}.layer_norm2", hidden)
        yield from _linear(f"{name}.mlp.fc1", hidden, inner)
        yield from _linear(f"{name}.mlp.fc2", inner, hidden)
    yield from _norm(f"{tower}.post_layernorm", hidden)
    yield "model.connector.modality_projection.proj.weight", (text["hidden_size"], merged)
