"""The last exam of a training: with the weights as they are kept, and by transformers."""

import json
import tarfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer

from models.vision.exam import Exam, Lack, by_transformers, examine, text_score
from models.vision.forward import Reader
from models.vision.prompts import score, table


class LastExam:
    """Three parts of the last evaluation, each with a file of results beside the archive."""

    def __init__(self, reader: Reader, tokenizer: Tokenizer, taken: Exam, archive: Path) -> None:
        self._reader, self._tokenizer, self._taken = reader, tokenizer, taken
        self._archive = archive
        torch.set_float32_matmul_precision("highest")
        with torch.no_grad():
            for parameter in reader.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))

    def ask(self, text_every: int, rank: int, world: int) -> None:
        """Take the parts that fall to this one of so many processes."""
        parts: dict[str, Callable[[], Any]] = {
            "scores": self._scores,
            "generated": self._generated,
            "text": partial(text_score, self._reader.model, self._tokenizer, text_every),
        }
        for index, (name, part) in enumerate(parts.items()):
            if index % world != rank:
                continue
            try:
                found = part()
            except Exception:  # noqa: BLE001 - the archive is there, and so may be other parts
                traceback.print_exc()
                continue
            path = self._archive.with_name(f"{name}.json")
            path.write_text(json.dumps(found, indent=1), encoding="utf-8")
            if name == "text":
                print(f"text {found}", flush=True)

    def _scores(self) -> Any:
        found = examine(self._reader, self._tokenizer, self._taken, Lack)
        print(table(found), flush=True)
        return found

    def _generated(self) -> Any:
        with TemporaryDirectory() as name:
            with tarfile.open(self._archive) as file:
                file.extractall(name, filter="data")
            folder = Path(name) / "home-vision"
            answers = by_transformers(folder, self._tokenizer, self._taken)
        found = {"transformers": score(self._taken.prompts, answers)}
        print(table(found), flush=True)
        wrong = [
            (p.group, p.text, p.expected, answer)
            for p, answer in zip(self._taken.prompts, answers, strict=True)
            if p.expected != answer.strip()
        ]
        return {**found, "wrong": wrong}
