"""Training of the vision variant: `python -m models.vision.train --out FOLDER`."""

import argparse
import math
import os
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor, distributed, multiprocessing, nn

from models.vision.exam import Lack, LastExam, exam, examine
from models.vision.folder import load_weights, new_model, write_folder
from models.vision.forward import Guide, Reader, picture_losses, text_loss
from models.vision.questions import held_out_prompts, table
from models.vision.rows import SIZES, Filler, Shape, vision_tokenizer
from models.vision.stream import TEXT_WIDTHS, Batch, Stream, text_shape

_WARM: Final = 3  # steps before a capture, in which everything is compiled

Compute = Callable[[Batch], Tensor]


def _key(batch: Batch) -> tuple[object, ...]:
    return tuple((name, tuple(tensor.shape)) for name, tensor in sorted(batch.items()))


class Captured:
    """Graphs by shape that compute losses and accumulate their gradients."""

    def __init__(self, compute: Compute, pool: tuple[int, int] | None = None) -> None:
        """Wrap `compute`, which runs backward and returns losses; gradients must be there."""
        self._compute = compute
        self.pool = pool
        self._graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}

    def capture(self, batch: Batch) -> bool:
        """Record the step for batches of this shape, while no other thread uses the GPU.

        Return whether that worked: where it did not, steps are launched kernel by kernel.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                self._compute(batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                losses = self._compute(batch)
        except RuntimeError:
            traceback.print_exc()
            torch.cuda.synchronize()
            return False
        self.pool = self.pool or graph.pool()
        self._graphs[_key(batch)] = graph, batch, losses
        return True

    def __call__(self, batch: Batch) -> Tensor:
        """Return the losses, detached."""
        known = self._graphs.get(_key(batch))
        if known is None:
            return self._compute(batch)
        graph, static, losses = known
        for name, tensor in static.items():
            tensor.copy_(batch[name])
        graph.replay()
        return losses


_GRACE_S: Final = 30.0  # for the others, once one has ended with an error
_TIMEOUT: Final = timedelta(seconds=120)


class Ranks:
    """Rank of this process among those that train together; without others it shares nothing."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def join(self, device: str) -> None:
        """Meet the others, once the processes that draw have been forked."""
        if self.world == 1:
            return
        backend = "gloo"
        if device == "cuda":
            torch.cuda.set_device(self.rank)
            backend = "cpu:gloo,cuda:nccl"
        distributed.init_process_group(
            backend, rank=self.rank, world_size=self.world, timeout=_TIMEOUT
        )

    def leave(self) -> None:
        """Part from the others, once all are done."""
        if self.world > 1:
            self.same(0.0)
            distributed.destroy_process_group()

    def average(self, parameters: list[torch.nn.Parameter]) -> None:
        """Replace the gradients by their mean over all."""
        if self.world == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        distributed.all_reduce(flat)
        flat /= self.world
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])

    def same(self, value: float) -> float:
        """Return the value of the first."""
        if self.world == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64)
        distributed.broadcast(told, 0)
        return float(told)

    def share(self, parameters: list[torch.nn.Parameter]) -> None:
        """Give everyone the weights of the first."""
        if self.world > 1:
            for parameter in parameters:
                distributed.broadcast(parameter.data, 0)


def run_ranks(work: Callable[[Any, Ranks], None], flags: Any, world: int) -> int:
    """Run `work` in so many processes, and return 0 once all have ended well.

    When one ends with an error the others get a while to end, too, and are ended then.
    """
    if world == 1:
        work(flags, Ranks(0, 1))
        return 0
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=work, args=(flags, Ranks(rank, world))) for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = float("inf")
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.5)
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    for process in processes:
        if process.is_alive():
            process.terminate()
            process.join(5)
            process.kill()
    codes: list[int] = [abs(process.exitcode or 0) for process in processes]
    return max(codes)


TOWER_RATE: Final = 1.5e-3
DECODER_RATE: Final = 1.2e-3
TEXT_SHARE: Final = 0.5
WARMUP: Final = 200  # steps
ARCHIVE: Final = "home-vision.tar"
_FEW: Final = 40  # questions of a group while the training runs
_GLANCE: Final = (Lack.NOTHING, Lack.POSITIONS)


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


def _first_batches(filler: Filler, shape: Shape) -> list[Batch]:
    """Return a batch of pictures of each size."""
    memory = mmap(-1, shape.nbytes)
    found: dict[int, Batch] = {}
    while len(found) < len(SIZES):
        size = filler.fill(memory)
        arrays = shape.views(memory, size)
        found[size] = {name: torch.tensor(array) for name, array in arrays.items()}
    return [found[size] for size in sorted(found)]


def _first_text(width: int, tokens: int) -> Batch:
    rows, width = text_shape(width, tokens)
    ids = torch.randint(3, 1000, (rows, width))
    return {"ids": ids, "answers": ids % 4 == 0}


class Training:
    """One run: its model, its stream and its clock."""

    def __init__(self, flags: argparse.Namespace, ranks: Ranks) -> None:
        """Start the processes first: CUDA must not be up when they fork."""
        self._began = time.monotonic()
        self.flags, self.ranks = flags, ranks
        name = f"cuda:{ranks.rank}" if flags.device == "cuda" else "cpu"
        self._device = torch.device(name)
        torch.manual_seed(flags.seed)
        self.tokenizer = vision_tokenizer(flags.text)
        seed = flags.seed + 10 * ranks.rank
        shape = Shape(flags.rows, flags.rows // 2)
        self._first = _first_batches(Filler(self.tokenizer, seed, shape), shape)
        text = self.tokenizer.to_str()
        self._stream = Stream(text, shape, flags.tokens, flags.workers, seed)
        ranks.join(flags.device)
        self.model = new_model(flags.text, self.tokenizer)
        if flags.start:
            load_weights(self.model, flags.start)
        prompts = held_out_prompts(flags.questions)
        self.exam = exam(self.tokenizer, prompts)
        self._few = exam(self.tokenizer, prompts[:: max(1, flags.questions // _FEW)])
        self.model.to(self._device)
        self.reader = Reader(self.model)
        features = 1 + len(self.reader.tower.deepstack_visual_indexes)
        width = self.model.config.text_config.hidden_size
        self._guide = Guide(width, features).to(self._device)
        self._optimizer = _optimizer(self.reader, self._guide)
        self._trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter)
        ranks.share(self._trained)
        self._factor = torch.ones((), device=self._device)
        self._pictures, self._texts = Captured(self._see), Captured(self._say)
        if flags.device == "cuda":
            torch.set_float32_matmul_precision("high")
            self.reader.compile_layers()
            self._capture()

    def _autocast(self) -> torch.autocast:
        big = self._device.type == "cuda"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=big, cache_enabled=False)

    def _see(self, batch: Batch) -> torch.Tensor:
        with self._autocast():
            seen, guided = picture_losses(self.reader, self._guide, batch)
        (seen + self._factor * guided).backward()
        return torch.stack([seen, guided]).detach()

    def _say(self, batch: Batch) -> torch.Tensor:
        with self._autocast():
            said = text_loss(self.reader, batch)
        (TEXT_SHARE * said).backward()
        return said.detach()

    def _capture(self) -> None:
        for batch in self._first:
            if not self._pictures.capture({n: t.to(self._device) for n, t in batch.items()}):
                return
        self._texts.pool = self._pictures.pool
        for width in TEXT_WIDTHS:
            batch = _first_text(width, self.flags.tokens)
            if not self._texts.capture({n: t.to(self._device) for n, t in batch.items()}):
                return
        self._tell(f"captured after {self._seconds():.0f} seconds")

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _tell(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)

    def _progress(self, first: float, step: int) -> float:
        span = max(1.0, self.flags.minutes * 60 - first)
        own = max((self._seconds() - first) / span, step / self.flags.steps)
        return self.ranks.same(own)

    def _step(self, step: int, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * _rate(progress, step)
        self._factor.fill_(max(0.05, 0.6 - progress))
        torch._foreach_zero_([p.grad for p in self._trained])
        seen = self._pictures(self._stream.pictures.take())
        said = self._texts(self._stream.texts.take())
        self.ranks.average(self._trained)
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        return seen, said

    def run(self) -> None:
        """Train until the time is over."""
        flags = self.flags
        self._stream.start(self._device)
        first = last = kept = self._seconds()
        step = 0
        while (progress := self._progress(first, step)) < 1:
            seen, said = self._step(step, progress)
            step += 1
            if step % flags.every == 0:
                self._stream.check()
                pictures, guide = seen.tolist()
                supply = self._stream.pictures
                self._tell(
                    f"step {step} pictures {pictures:.4f} guide {guide:.4f} "
                    f"text {said.item():.4f} fresh {supply.fresh} again {supply.again} "
                    f"texts again {self._stream.texts.again} seconds {self._seconds():.0f}"
                )
            if self.ranks.rank == 0 and self._seconds() - last > flags.look:
                last = self._seconds()
                few = examine(self.reader, self.tokenizer, self._few, _GLANCE)
                self._tell(table(few))
            if self.ranks.rank == 0 and self._seconds() - kept > flags.keep:
                kept = self._seconds()
                self.keep()
        drawn = self._stream.pictures.fresh * self._stream.shape.pictures * self.ranks.world
        self._tell(f"end: {step} steps, {drawn} pictures, {self._seconds():.0f} seconds")
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
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch of text")
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 2) - 1))
    parser.add_argument("--questions", type=int, default=150, help="of each group, held out")
    parser.add_argument("--text-every", type=int, default=1, help="every so-many-th text prompt")
    parser.add_argument("--every", type=int, default=100, help="steps between two lines")
    parser.add_argument("--look", type=float, default=45, help="seconds between two tables")
    parser.add_argument("--keep", type=float, default=60, help="seconds between two archives")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs to train on")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def _work(flags: argparse.Namespace, ranks: Ranks) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    training = Training(flags, ranks)
    training.run()
    if ranks.rank == 0:
        training.keep()
    ranks.same(0.0)
    last = LastExam(training.reader, training.tokenizer, training.exam, flags.out / ARCHIVE)
    last.ask(flags.text_every, ranks.rank, ranks.world)
    ranks.leave()


def main() -> None:
    """Train, keep the folder, and ask what was held out."""
    flags = _flags()
    sys.exit(run_ranks(_work, flags, flags.ranks))


if __name__ == "__main__":
    main()
