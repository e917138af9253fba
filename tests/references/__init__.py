"""Small random models with the logits that transformers gives for them in float32."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

_HERE = Path(__file__).parent
NAMES = (
    "qwen3",
    "qwen3_untied",
    "qwen2",
    "llama",
    "llama3_scaled",
    "llama_linear",
    "llama_biased",
)


class ReferenceRow(NamedTuple):
    """One row: `token_ids` [T] (prompt, then greedy tokens) and `logits` [T, V] at each of them.

    `logits[t]` ranks the token at position t + 1, so `logits[prompt_length - 1]` chose the first
    generated token. The last logits have no successor in `token_ids`.
    """

    token_ids: list[int]
    prompt_length: int
    logits: NDArray[np.float32]


def reference_folder(name: str) -> Path:
    """The Hugging Face folder of a stored model (read only: tests export or copy it)."""
    return _HERE / name


def reference_logits(name: str) -> list[ReferenceRow]:
    """The ragged rows of a stored model, longest prompt first, with their float32 logits."""
    return split_rows(load_file(_HERE / name / "reference.safetensors"))


def split_rows(stored: dict[str, NDArray[Any]]) -> list[ReferenceRow]:
    """Rows of a reference file, whose tensors hold one row behind the other."""
    rows = []
    start = 0
    for length, prompt_length in zip(stored["lengths"], stored["prompt_lengths"], strict=True):
        end = start + int(length)
        ids = [int(token) for token in stored["token_ids"][start:end]]
        rows.append(ReferenceRow(ids, int(prompt_length), stored["logits"][start:end]))
        start = end
    return rows
