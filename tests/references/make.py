"""Make the stored reference models: `python -m tests.references.make [NAME]`, with transformers.

Every model is random, with weights large enough that its logits spread and its greedy tokens are
no near-ties. Spelling of config.json, source type, shards and head vary from model to model.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PROMPT_LENGTHS = (13, 6, 2)
GENERATED = 12
VOCABULARY = 288
SMALLEST_GAP = 2e-3
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Recipe(NamedTuple):
    """How one reference model differs from the others; `spelling` is a transformers version."""

    config: Any
    kind: Any
    spelling: int
    dtype: torch.dtype
    shards: int = 1


def recipes() -> dict[str, Recipe]:
    """All stored models by name."""
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    return {
        "qwen3": Recipe(
            Qwen3Config(**SIZES, tie_word_embeddings=True), Qwen3ForCausalLM, 5, bf16
        ),
        "qwen3_untied": Recipe(
            Qwen3Config(**{**SIZES, "head_dim": 24}, tie_word_embeddings=False),
            Qwen3ForCausalLM, 4, bf16, shards=3,
        ),
        "qwen2": Recipe(
            Qwen2Config(**{**SIZES, "head_dim": 8}, tie_word_embeddings=True),
            Qwen2ForCausalLM, 4, bf16,
        ),
        "llama": Recipe(LlamaConfig(**SIZES, tie_word_embeddings=False), LlamaForCausalLM, 5, f32),
        "llama3_scaled": Recipe(
            LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3),
            LlamaForCausalLM, 4, f16,
        ),
        "llama_linear": Recipe(
            LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=linear),
            LlamaForCausalLM, 5, f16,
        ),
        "llama_biased": Recipe(
            LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
            LlamaForCausalLM, 5, bf16,
        ),
    }  # fmt: skip


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer whose ids all lie below `VOCABULARY`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["turn on the lamp in the kitchen, then open the door"] * 4, trainer
    )
    return tokenizer


def build(recipe: Recipe, seed: int) -> Any:
    """A random model in float32 whose weights are exact in the recipe's source type."""
    torch.manual_seed(seed)
    model = recipe.kind(recipe.config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand_like(weight) + 0.5)
            if name.endswith("bias"):
                weight.copy_(torch.randn_like(weight))
            weight.copy_(weight.to(recipe.dtype).float())
    return model


def generate(model: Any, prompt: list[int]) -> tuple[list[int], Any, float]:
    """Greedy tokens after `prompt`, the logits at every position, and the smallest top-2 gap."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(GENERATED):
            logits = model(torch.tensor([ids])).logits[0]
            ids.append(int(logits[-1].argmax()))
        logits = model(torch.tensor([ids])).logits[0]
    best = logits[len(prompt) - 1 :].topk(2).values
    return ids, logits, float((best[:, 0] - best[:, 1]).min())


def run_rows(model: Any, seed: int) -> tuple[dict[str, Any], float]:
    """The stored tensors of one model and the smallest top-2 gap of any generated token."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(3, VOCABULARY, n).tolist() for n in PROMPT_LENGTHS]
    rows = [generate(model, prompt) for prompt in prompts]
    tensors = {
        "token_ids": torch.tensor([token for ids, _, _ in rows for token in ids]),
        "lengths": torch.tensor([len(ids) for ids, _, _ in rows]),
        "prompt_lengths": torch.tensor(PROMPT_LENGTHS),
        "logits": torch.cat([logits for _, logits, _ in rows]).contiguous(),
    }
    return tensors, min(gap for _, _, gap in rows)


def write_weights(folder: Path, model: Any, recipe: Recipe) -> None:
    """Write the weights in the source type, in as many shards as the recipe asks for."""
    tied = recipe.config.tie_word_embeddings
    tensors = {
        name: weight.detach().to(recipe.dtype).contiguous()
        for name, weight in model.named_parameters()
        if not (tied and name == "lm_head.weight")
    }
    if recipe.shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(recipe.shards):
        file = f"model-{shard + 1:05}-of-{recipe.shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard :: recipe.shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def spell_config(recipe: Recipe) -> dict[str, Any]:
    """The config.json as the recipe's transformers version writes it."""
    config: dict[str, Any] = json.loads(recipe.config.to_json_string())
    config["architectures"] = [recipe.kind.__name__]
    rope = config.pop("rope_parameters")
    dtype = str(recipe.dtype).removeprefix("torch.")
    if recipe.spelling == 5:
        return {**config, "dtype": dtype, "rope_parameters": rope}
    config["transformers_version"] = "4.51.0"
    config.pop("layer_types", None)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    default = scaling["rope_type"] == "default"
    return {
        **config,
        "torch_dtype": dtype,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if default else scaling,
    }


def write_text_files(folder: Path, recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Tokenizer, chat template (in either of its two places) and generation settings."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings: dict[str, Any] = {"eos_token": "<|im_end|>"}
    if recipe.spelling == 5:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    else:
        settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_model(folder: Path, model: Any, recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face folder."""
    folder.mkdir()
    write_weights(folder, model, recipe)
    (folder / "config.json").write_text(json.dumps(spell_config(recipe), indent=1))
    write_text_files(folder, recipe, tokenizer)


def make(name: str, recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Write one reference folder, trying seeds until no greedy token is a near-tie."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    for seed in range(100):
        model = build(recipe, seed)
        tensors, gap = run_rows(model, seed)
        if gap > SMALLEST_GAP:
            break
    else:
        raise SystemExit(f"{name}: every seed has a near-tie")
    write_model(folder, model, recipe, tokenizer)
    save_file(tensors, folder / "reference.safetensors")


def main() -> None:
    """Make every stored model anew, or those that are named."""
    tokenizer = make_tokenizer()
    for name, recipe in recipes().items():
        if name in sys.argv[1:] or not sys.argv[1:]:
            make(name, recipe, tokenizer)


if __name__ == "__main__":
    main()
