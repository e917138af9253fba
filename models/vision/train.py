"""Training of the vision variant: `python -m models.vision.train --out FOLDER`."""

import argparse
import json
import math
import os
import tarfile
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.evaluate import Score
from models.vision.drawing import CLASSES
from models.vision.exam import (
    Exam,
    Lack,
    by_transformers,
    exam,
    greedy,
    held_out_prompts,
    score,
    text_score,
)
from models.vision.folder import new_model, vision_tokenizer, write_folder
from models.vision.forward import Reader
from models.vision.stream import Batch, Shape, Stream

TOWER_RATE: Final = 1.5e-3
DECODER_RATE: Final = 8e-4
TEXT_SHARE: Final = 0.5
WARMUP: Final = 200  # steps
DROPPED: Final = 0.15  # pictures whose merged embeddings are left out: deepstack has to tell
NOTHING_SEEN: Final = 0.15  # weight of places where there is nothing
_FIELDS: Final = 2  # the merged embeddings are asked for kind and colour alone

_functional = nn.functional


class Guide(nn.Module):
    """Heads that name what stands at each merged patch; they guide the tower and are left off."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Linear(width, sum(CLASSES if index else CLASSES[:_FIELDS]))
            for index in range(features)
        )

    def forward(self, features: list[Tensor], seen: Tensor) -> Tensor:
        """Return the mean loss over heads and fields; `seen` [tokens, 6]."""
        losses = []
        for index, (head, feature) in enumerate(zip(self.heads, features, strict=True)):
            classes = CLASSES if index else CLASSES[:_FIELDS]
            parts = head(feature).float().split(classes, -1)
            for field, part in enumerate(parts):
                weight = torch.ones(part.shape[1], device=part.device)
                weight[0] = NOTHING_SEEN
                losses.append(_functional.cross_entropy(part, seen[:, field].long(), weight))
        return torch.stack(losses).mean()


def _answer_loss(reader: Reader, hidden: Tensor, batch: Batch) -> Tensor:
    wanted = batch["answers"][:, 1:]
    logits = reader.logits(hidden[:, :-1][wanted])
    return _functional.cross_entropy(logits, batch["ids"][:, 1:][wanted])


def _picture_loss(reader: Reader, guide: Guide, batch: Batch, share: float) -> tuple[Tensor, ...]:
    features = reader.look(batch["pixels"])
    pictures = len(batch["pixels"])
    flat = [part.flatten(0, -2) for part in features]
    guided = guide(flat, batch["seen"].flatten(0, 1)) if share else flat[0].new_zeros(())
    kept = torch.rand(pictures, 1, 1, device=flat[0].device) >= DROPPED
    main = flat[0].view(pictures, -1, flat[0].shape[-1])
    flat[0] = (main * kept).flatten(0, 1)
    hidden = reader.read(batch["ids"], batch["positions"], flat, batch["where"])
    return _answer_loss(reader, hidden, batch), guided


def _text_loss(reader: Reader, batch: Batch) -> Tensor:
    line = torch.arange(batch["ids"].shape[1], device=batch["ids"].device)
    hidden = reader.read(batch["ids"], line.expand(3, 1, -1), [], line)
    return _answer_loss(reader, hidden, batch)


def _optimizer(reader: Reader, guide: Guide) -> torch.optim.AdamW:
    tower = [*reader.tower.parameters(), *guide.parameters()]
    decoder = list(reader.decoder.parameters())
    groups = [
        {
            "params": [p for p in part if (p.ndim > 1) == big],
            "weight_decay": 0.05 * big,
            "peak": peak,
        }
        for part, peak in ((tower, TOWER_RATE), (decoder, DECODER_RATE))
        for big in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def _share(progress: float, step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress)) * min(1.0, (step + 1) / WARMUP)


def table(scores: dict[str, dict[str, Score]]) -> str:
    """Return one line for each way of asking, one column for each group."""
    groups = list(next(iter(scores.values())))
    lines = ["              " + " ".join(f"{group:>9}" for group in groups)]
    for name, found in scores.items():
        shares = " ".join(f"{100 * found[group].share:9.1f}" for group in groups)
        lines.append(f"{name:14}{shares}")
    return "\n".join(lines)


def examine(
    reader: Reader, tokenizer: Tokenizer, taken: Exam, lacks: tuple[Lack, ...]
) -> dict[str, dict[str, Score]]:
    """Return the scores by what is missing."""
    return {
        lack.value: score(taken.prompts, greedy(reader, tokenizer, taken, lack)) for lack in lacks
    }


class Training:
    """One run: its model, its stream and its clock."""

    def __init__(self, flags: argparse.Namespace) -> None:
        """Start the processes first: CUDA must not be up when they fork."""
        self.flags = flags
        self._began = time.monotonic()
        torch.manual_seed(flags.seed)
        self.tokenizer = vision_tokenizer(flags.text)
        shape = Shape(flags.rows, flags.rows // 2)
        self._stream = Stream(self.tokenizer, shape, flags.tokens, flags.workers, flags.seed)
        self.model = new_model(flags.text, self.tokenizer)
        prompts = held_out_prompts(flags.questions)
        self.exam = exam(self.tokenizer, prompts)
        few = prompts[:: max(1, flags.questions // 40)]
        self._small = exam(self.tokenizer, few)

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> None:
        """Train until the time is over."""
        flags = self.flags
        self.model.to(flags.device)
        self.reader = Reader(self.model)
        features = 1 + len(self.reader.tower.deepstack_visual_indexes)
        guide = Guide(self.model.config.text_config.hidden_size, features).to(flags.device)
        optimizer = _optimizer(self.reader, guide)
        if flags.device == "cuda":
            torch.set_float32_matmul_precision("high")
            self.reader.compile_layers()
        self._stream.start(flags.device)
        first, last, step = self._seconds(), 0.0, 0
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        while step < flags.steps:
            progress = max(
                (self._seconds() - first) / max(1.0, flags.minutes * 60 - first), step / flags.steps
            )
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * _share(progress, step)
            guiding = max(0.05, 1 - 1.5 * progress)
            with torch.autocast(flags.device, torch.bfloat16, enabled=flags.device == "cuda"):
                seen, guided = _picture_loss(self.reader, guide, self._stream.pictures(), guiding)
                said = _text_loss(self.reader, self._stream.text())
            loss = seen + TEXT_SHARE * said + guiding * guided
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            step += 1
            if step % flags.every == 0:
                print(
                    f"step {step} pictures {seen.item():.4f} guide {guided.item():.4f} "
                    f"text {said.item():.4f} fresh {self._stream.fresh} again "
                    f"{self._stream.again} seconds {self._seconds():.0f}",
                    flush=True,
                )
            if self._seconds() - last > flags.look and step > 1:
                last = self._seconds()
                print(
                    table(examine(self.reader, self.tokenizer, self._small, tuple(Lack))),
                    flush=True,
                )
            if step % flags.keep == 0:
                keep(flags.out, self.model, self.tokenizer)
        fresh = self._stream.fresh * self._stream.shape.pictures
        print(
            f"end: {step} steps, {fresh} distinct pictures, {self._seconds():.0f} seconds",
            flush=True,
        )
        self._stream.stop()


def keep(out: Path, model: Any, tokenizer: Tokenizer) -> None:
    """Write the folder as one file, home-vision.tar."""
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name:
        write_folder(Path(name) / "home-vision", model, tokenizer)
        with tarfile.open(out / "new.tar", "w") as archive:
            archive.add(Path(name) / "home-vision", "home-vision")
    (out / "new.tar").replace(out / "home-vision.tar")


def _say(results: dict[str, Any], out: Path) -> None:
    (out / "results.json").write_text(json.dumps(results, indent=1), "utf-8")


def _exams(training: Training, results: dict[str, Any]) -> None:
    found = examine(training.reader, training.tokenizer, training.exam, tuple(Lack))
    print(table(found), flush=True)
    results["scores"] = found


def _texts(training: Training, results: dict[str, Any]) -> None:
    every = training.flags.text_every
    results["text"] = text_score(training.model, training.tokenizer, every)
    print(f"text {results['text']} {results['text'].share:.4f}", flush=True)


def _generated(training: Training, results: dict[str, Any]) -> None:
    with TemporaryDirectory() as name:
        with tarfile.open(training.flags.out / "home-vision.tar") as archive:
            archive.extractall(name, filter="data")
        folder = Path(name) / "home-vision"
        answers = by_transformers(folder, training.tokenizer, training.exam)
    prompts = training.exam.prompts
    results["transformers"] = score(prompts, answers)
    print(table({"transformers": results["transformers"]}), flush=True)
    results["wrong"] = [
        (p.group, p.text, p.expected, a)
        for p, a in zip(prompts, answers, strict=True)
        if p.expected != a.strip()
    ]


def _after(training: Training) -> None:
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():  # from here on with the weights as they are kept
        for parameter in training.model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    results: dict[str, Any] = {}
    for ask in (_exams, _texts, _generated):
        try:
            ask(training, results)
        except Exception:  # the archive is there already, and the log says what went wrong
            traceback.print_exc()
        _say(results, training.flags.out)


def main() -> None:
    """Train, keep the folder, and ask what was held out."""
    parser = argparse.ArgumentParser(description=__doc__)
    cuda = "cuda" if Path("/dev/nvidia0").exists() else "cpu"
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=Path("models/home"))
    parser.add_argument("--device", default=cuda)
    parser.add_argument(
        "--minutes", type=float, default=8, help="training ends so long after the start"
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=24576, help="of a batch of text")
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 2) - 1))
    parser.add_argument("--questions", type=int, default=150, help="of each group, held out")
    parser.add_argument("--text-every", type=int, default=1, help="every so-many-th text prompt")
    parser.add_argument("--every", type=int, default=100, help="steps between two lines")
    parser.add_argument("--look", type=float, default=45, help="seconds between two tables")
    parser.add_argument("--keep", type=int, default=2000, help="steps between two archives")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    training = Training(flags)
    training.run()
    keep(flags.out, training.model, training.tokenizer)
    _after(training)


if __name__ == "__main__":
    main()
