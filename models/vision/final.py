"""The last exam of a training: with the weights as they are kept, and by transformers."""

import json
import tarfile
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer

from models.vision.exam import (
    Exam,
    Lack,
    by_transformers,
    examine,
    text_score,
)
from models.vision.forward import Reader
from models.vision.prompts import score, table


def _generated(archive: Path, tokenizer: Tokenizer, taken: Exam) -> list[str]:
    with TemporaryDirectory() as name:
        with tarfile.open(archive) as file:
            file.extractall(name, filter="data")
        answers: list[str] = by_transformers(Path(name) / "home-vision", tokenizer, taken)
    return answers


def ask_everything(
    reader: Reader, tokenizer: Tokenizer, taken: Exam, archive: Path, text_every: int
) -> None:
    """Print all scores and write them beside the archive as results.json, each once it is known."""
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        for parameter in reader.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    results: dict[str, Any] = {}
    try:
        results["scores"] = examine(reader, tokenizer, taken, Lack)
        print(table(results["scores"]), flush=True)
        results["text"] = text_score(reader.model, tokenizer, text_every)
        print(f"text {results['text'].share:.4f}", flush=True)
        answers = _generated(archive, tokenizer, taken)
        results["transformers"] = score(taken.prompts, answers)
        print(table({"transformers": results["transformers"]}), flush=True)
        results["wrong"] = [
            (p.group, p.text, p.expected, answer)
            for p, answer in zip(taken.prompts, answers, strict=True)
            if p.expected != answer.strip()
        ]
    except Exception:  # noqa: BLE001 - the archive is there; what is known is to be kept as well
        traceback.print_exc()
    text = json.dumps(results, indent=1)
    archive.with_name("results.json").write_text(text, encoding="utf-8")
