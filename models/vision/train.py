"""Training of the vision variant: `python -m models.vision.train --out FOLDER`."""

import argparse
import math
import os
import tarfile
import time
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from torch import nn

from models.vision.batch import SIZES, Filler, Shape
from models.vision.exam import Lack, exam, examine
from models.vision.final import ask_everything
from models.vision.folder import load_weights, new_model, vision_tokenizer, write_folder
from models.vision.forward import Reader
from models.vision.guide import Guide, text_loss
from models.vision.picture_step import PictureStep
from models.vision.prompts import SIZE, held_out_prompts, table
from models.vision.stream import Batch, Stream

TOWER_RATE: Final = 1.5e-3
DECODER_RATE: Final = 1.2e-3
TEXT_SHARE: Final = 0.5
WARMUP: Final = 200  # steps
ARCHIVE: Final = "home-vision.tar"
_FEW: Final = 40  # questions of a group while the training runs


def _optimizer(reader: Reader, guide: Guide) -> torch.optim.AdamW:
    tower = [*reader.tower.parameters(), *guide.parameters()]
    parts = ((tower, TOWER_RATE), (list(reader.decoder.parameters()), DECODER_RATE))
    groups = [
        {
            "params": [p for p in part if (p.ndim > 1) == matrices],
            "weight_decay": 0.05 * matrices,
            "peak": peak,
        }
        for part, peak in parts
        for matrices in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def _rate(progress: float, step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress)) * min(1.0, (step + 1) / WARMUP)


def _first_batch(filler: Filler, shape: Shape) -> Batch:
    memory = mmap(-1, shape.nbytes)
    size = filler.fill(memory)
    while SIZES[size] != SIZE:
        size = filler.fill(memory)
    return {name: torch.tensor(array) for name, array in shape.views(memory, size).items()}


class Training:
    """One run: its model, its stream and its clock."""

    def __init__(self, flags: argparse.Namespace) -> None:
        """Start the processes first: CUDA must not be up when they fork."""
        self.flags = flags
        self._began = time.monotonic()
        torch.manual_seed(flags.seed)
        self.tokenizer = vision_tokenizer(flags.text)
        shape = Shape(flags.rows, flags.rows // 2)
        self._first = _first_batch(Filler(self.tokenizer, flags.seed, shape), shape)
        text = self.tokenizer.to_str()
        self._stream = Stream(text, shape, flags.tokens, flags.workers, flags.seed)
        self.model = new_model(flags.text, self.tokenizer)
        if flags.start:
            load_weights(self.model, flags.start)
        prompts = held_out_prompts(flags.questions)
        self.exam = exam(self.tokenizer, prompts)
        self._few = exam(self.tokenizer, prompts[:: max(1, flags.questions // _FEW)])
        self.model.to(flags.device)
        self.reader = Reader(self.model)
        if flags.device == "cuda":
            torch.set_float32_matmul_precision("high")
            self.reader.compile_layers()

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _say(self, step: int, losses: tuple[torch.Tensor, ...]) -> None:
        pictures, guide, text = (loss.item() for loss in losses)
        supply = self._stream.pictures
        print(
            f"step {step} pictures {pictures:.4f} guide {guide:.4f} text {text:.4f} "
            f"fresh {supply.fresh} again {supply.again} seconds {self._seconds():.0f}",
            flush=True,
        )

    def run(self) -> None:
        """Train until the time is over."""
        flags, device = self.flags, self.flags.device
        features = 1 + len(self.reader.tower.deepstack_visual_indexes)
        guide = Guide(self.model.config.text_config.hidden_size, features).to(device)
        optimizer = _optimizer(self.reader, guide)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        pictures = PictureStep(self.reader, guide, device)
        if device == "cuda":
            pictures.capture({name: tensor.cuda() for name, tensor in self._first.items()})
            print(f"captured after {self._seconds():.0f} seconds", flush=True)
        self._stream.start(device)
        first = last = self._seconds()
        step, span = 0, max(1.0, flags.minutes * 60 - first)
        while (progress := max((self._seconds() - first) / span, step / flags.steps)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * _rate(progress, step)
            guiding = max(0.05, 1 - 1.5 * progress)
            seen, guided = pictures(self._stream.pictures.take(), guiding)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                said = text_loss(self.reader, self._stream.texts.take())
            (TEXT_SHARE * said).backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            step += 1
            if step % flags.every == 0:
                self._stream.check()
                self._say(step, (seen, guided, said))
            if self._seconds() - last > flags.look:
                last = self._seconds()
                print(table(examine(self.reader, self.tokenizer, self._few, Lack)), flush=True)
            if step % flags.keep == 0:
                self.keep()
        drawn = self._stream.pictures.fresh * self._stream.shape.pictures
        print(f"end: {step} steps, {drawn} pictures, {self._seconds():.0f} seconds", flush=True)
        self._stream.stop()

    def keep(self) -> None:
        """Write the folder as one file, `home-vision.tar`."""
        out = self.flags.out
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as name:
            write_folder(Path(name), self.model, self.tokenizer)
            with tarfile.open(out / "new.tar", "w") as archive:
                archive.add(name, "home-vision")
        (out / "new.tar").replace(out / ARCHIVE)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=Path("models/home"), help="the text model")
    parser.add_argument("--start", type=Path, help="a folder of the vision variant to go on from")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8, help="from the start to the last step")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch of text")
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 2) - 1))
    parser.add_argument("--questions", type=int, default=150, help="of each group, held out")
    parser.add_argument("--text-every", type=int, default=1, help="every so-many-th text prompt")
    parser.add_argument("--every", type=int, default=100, help="steps between two lines")
    parser.add_argument("--look", type=float, default=45, help="seconds between two tables")
    parser.add_argument("--keep", type=int, default=2000, help="steps between two archives")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Train, keep the folder, and ask what was held out."""
    flags = _flags()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    training = Training(flags)
    training.run()
    training.keep()
    archive = flags.out / ARCHIVE
    ask_everything(training.reader, training.tokenizer, training.exam, archive, flags.text_every)


if __name__ == "__main__":
    main()
