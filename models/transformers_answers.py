"""Greedy answers from a model folder loaded with transformers, many at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.conversations import Message

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
