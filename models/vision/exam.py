"""The last exam of a training: with the weights as they are kept, and by transformers."""

import json
import tarfile
import traceback
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen3VLForConditionalGeneration

from models.evaluate import MAX_TOKENS, Score
from models.folder import answers as text_answers
from models.folder import new_model as new_text_model
from models.folder import write_folder as write_text_folder
from models.splits import held_out
from models.stream import END
from models.vision.drawing import Picture
from models.vision.forward import PATCH, Reader, patches
from models.vision.questions import Prompt, score, table
from models.vision.rows import IMAGE, Row, Shown, Writer
from models.vision.scenes import Scene

LONGEST: Final = 32  # tokens of an answer
_GREY: Final = 128
_SEED: Final = 12


class Lack(Enum):
    """Ablations: the input that a model answers without."""

    NOTHING = "whole"
    PICTURE = "blank"
    DEEPSTACK = "no deepstack"
    POSITIONS = "shuffled"


class Exam(NamedTuple):
    """Prompts as token rows, padded, and their pictures."""

    prompts: list[Prompt]
    rows: list[Row]
    pixels: Tensor


def exam(tokenizer: Tokenizer, prompts: list[Prompt]) -> Exam:
    """Return the prompts made ready."""
    writer, rows = Writer(tokenizer), []
    for prompt in prompts:
        height, width = prompt.pixels.shape[:2]
        picture = Picture(prompt.pixels, np.empty(0, np.uint8))
        shown = Shown(Scene("", width, height), picture, across=False, down=False)
        rows.append(writer.prompt(shown, prompt.text))
    pixels = np.stack([prompt.pixels for prompt in prompts])
    return Exam(prompts, rows, torch.from_numpy(pixels))


@torch.no_grad()  # type: ignore[untyped-decorator] # torch has no types here
def greedy(
    reader: Reader, tokenizer: Tokenizer, taken: Exam, lack: Lack = Lack.NOTHING
) -> list[str]:
    """Return the answers of the model as training runs it, without a cache."""
    device = next(reader.parameters()).device
    reader.eager = True
    end = tokenizer.token_to_id(END)
    number, longest = len(taken.rows), max(len(row.ids) for row in taken.rows)
    ids = torch.zeros(number, longest + LONGEST, dtype=torch.long)
    positions = torch.zeros(3, *ids.shape, dtype=torch.long)
    generator = torch.Generator().manual_seed(_SEED)
    for index, row in enumerate(taken.rows):
        length = len(row.ids)
        ids[index, :length] = torch.from_numpy(row.ids)
        place = torch.tensor(row.positions)
        if lack is Lack.POSITIONS:
            seen = torch.nonzero(ids[index, :length] == tokenizer.token_to_id(IMAGE))[:, 0]
            place[:, seen] = place[:, seen[torch.randperm(len(seen), generator=generator)]]
        positions[:, index, :length] = place
        after = int(place.max()) + 1
        positions[:, index, length:] = torch.arange(after, after + ids.shape[1] - length)
    lengths = torch.tensor([len(row.ids) for row in taken.rows], device=device)
    ids, positions = ids.to(device), positions.to(device)
    pixels = taken.pixels.to(device)
    if lack is Lack.PICTURE:
        pixels = torch.full_like(pixels, _GREY)
    where = torch.nonzero(ids.flatten() == tokenizer.token_to_id(IMAGE))[:, 0]
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        features = reader.look(pixels)
        if lack is Lack.DEEPSTACK:
            features = [features[0], *(torch.zeros_like(deep) for deep in features[1:])]
        features = [part.flatten(0, -2) for part in features]
        lines = torch.arange(number, device=device)
        open_rows = torch.ones(number, dtype=torch.bool, device=device)
        for step in range(LONGEST):
            hidden = reader.read(ids, positions, features, where)
            chosen = reader.logits(hidden[lines, lengths + step - 1]).argmax(-1)
            ids[lines, lengths + step] = chosen
            open_rows &= chosen != end
            if not open_rows.any():
                break
    reader.eager = False
    made = [ids[i, length : length + LONGEST].tolist() for i, length in enumerate(lengths.tolist())]
    kept = [line[: line.index(end)] if end in line else line for line in made]
    return [tokenizer.decode(line) for line in kept]


def examine(
    reader: Reader, tokenizer: Tokenizer, taken: Exam, lacks: Iterable[Lack]
) -> dict[str, dict[str, Score]]:
    """Return the scores by what is missing."""
    return {
        lack.value: score(taken.prompts, greedy(reader, tokenizer, taken, lack)) for lack in lacks
    }


@torch.no_grad()  # type: ignore[untyped-decorator] # torch has no types here
def by_transformers(folder: Path, tokenizer: Tokenizer, taken: Exam, rows: int = 350) -> list[str]:
    """Return the answers of the folder's model, generated in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).to(device)
    image, found = tokenizer.token_to_id(IMAGE), []
    for begin in range(0, len(taken.rows), rows):
        part = taken.rows[begin : begin + rows]
        longest = max(len(row.ids) for row in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(part):
            ids[index, longest - len(row.ids) :] = torch.from_numpy(row.ids)
            mask[index, longest - len(row.ids) :] = 1
        pixels = taken.pixels[begin : begin + rows]
        flat = patches(pixels).flatten(0, 1).view(-1, 3, 1, PATCH * PATCH)
        grid = [1, pixels.shape[1] // PATCH, pixels.shape[2] // PATCH]
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": (ids == image).int(),
            "pixel_values": flat.expand(-1, -1, 2, -1).flatten(1),
            "image_grid_thw": torch.tensor([grid] * len(part)),
        }
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        made = model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
        found += tokenizer.decode_batch(made[:, longest:].tolist())
    return found


def answers_of(folder: Path, prompts: list[Prompt], lack: Lack) -> list[str]:
    """Return the answers of a model folder; what lacks nothing is generated by transformers."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    taken = exam(tokenizer, prompts)
    if lack is Lack.NOTHING:
        made: list[str] = by_transformers(folder, tokenizer, taken)
        return made
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    reader = Reader(model.to("cuda" if torch.cuda.is_available() else "cpu"))
    answers: list[str] = greedy(reader, tokenizer, taken, lack)
    return answers


def text_score(model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, every: int) -> Score:
    """Return how many of the text model's own held-out prompts are still answered exactly."""
    inner = new_text_model()
    weights = model.model.language_model.state_dict()
    inner.load_state_dict({f"model.{name}": w for name, w in weights.items()}, strict=False)
    prompts = held_out()[::every]
    with TemporaryDirectory() as name:
        write_text_folder(Path(name), inner, tokenizer)
        found = text_answers(Path(name), [p.messages for p in prompts], MAX_TOKENS, 400)
    right = sum(a.strip() == p.expected for a, p in zip(found, prompts, strict=True))
    return Score(right, len(prompts))


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
