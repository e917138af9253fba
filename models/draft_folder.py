"""The draft's folder, in the published EAGLE-3 format: config.json and model.safetensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.draft_model import TAPS, Draft, DraftShape
from models.folder import CONFIG


def config_of(shape: DraftShape) -> dict[str, Any]:
    """Return the draft's config.json.

    The taps stand in it under both names that are in use, which name a layer by its output: the
    input of the next.
    """
    outputs = [tap - 1 for tap in TAPS]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "bos_token_id": CONFIG["bos_token_id"],
        "draft_vocab_size": shape.vocabulary,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True},
        "eos_token_id": CONFIG["eos_token_id"],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": CONFIG["max_position_embeddings"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": CONFIG["pad_token_id"],
        "rms_norm_eps": shape.epsilon,
        "rope_scaling": None,
        "rope_theta": shape.theta,
        "target_hidden_size": shape.hidden,
        "target_layer_ids": outputs,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": CONFIG["vocab_size"],
    }


def write_draft(out: Path, draft: Draft) -> None:
    """Write the folder, with the weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_of(draft.shape), indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in draft.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", {"format": "pt"})


def read_draft(folder: Path) -> Draft:
    """Return the draft of a folder, in float32."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    shape = DraftShape(
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        vocabulary=config["draft_vocab_size"],
        theta=config["rope_theta"],
        epsilon=config["rms_norm_eps"],
    )
    draft = Draft(shape)
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return draft
