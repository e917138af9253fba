"""The model folder: its configuration, its template, its files, and answers from one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from models.conversations import Message
from models.stream import END, END_OF_TEXT, START, VOCABULARY

TEMPLATE: Final = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}\n"
)
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "max_position_embeddings": 2048,
    "max_window_layers": 12,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 12,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}
GENERATION: Final[dict[str, Any]] = {
    "bos_token_id": 0,
    "do_sample": False,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
}
TOKENIZER: Final[dict[str, Any]] = {
    "add_prefix_space": False,
    "additional_special_tokens": [START, END],
    "clean_up_tokenization_spaces": False,
    "eos_token": END,
    "model_max_length": CONFIG["max_position_embeddings"],
    "pad_token": END_OF_TEXT,
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def new_model() -> Qwen3ForCausalLM:
    """Return the untrained model."""
    known = {"architectures", "model_type", "torch_dtype"}
    fields = {key: value for key, value in CONFIG.items() if key not in known}
    return Qwen3ForCausalLM(Qwen3Config(**fields))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_folder(out: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Write everything that a loader needs, with the weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(out / "config.json", CONFIG)
    _write_json(out / "generation_config.json", GENERATION)
    _write_json(out / "tokenizer_config.json", TOKENIZER)
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, out / "model.safetensors", {"format": "pt"})


ROWS: Final = 100


def answers(
    folder: Path, chats: Sequence[list[Message]], max_tokens: int, rows: int = ROWS
) -> list[str]:
    """Return the answer to each chat, computed in float32, so many rows at once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    texts = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in chats
    ]
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found: dict[int, str] = {}
    for begin in range(0, len(order), rows):
        part = order[begin : begin + rows]
        inputs = tokenizer([texts[i] for i in part], return_tensors="pt", padding=True).to(device)
        with torch.inference_mode():
            outputs = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        replies = outputs[:, inputs["input_ids"].shape[1] :]
        texts_out = tokenizer.batch_decode(replies, skip_special_tokens=True)
        found.update(zip(part, texts_out, strict=True))
    return [found[index] for index in range(len(texts))]
