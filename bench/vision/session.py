"""The measurements of `bench vision`, over drawn photographs, with one daemon and one peer."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from io import BytesIO
from itertools import count, repeat
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import uvloop
from PIL import Image, ImageDraw

from hearth.bench.child_process import family_usage
from hearth.bench.contenders.contender import Device
from hearth.bench.memory import gpu_meter
from hearth.bench.report import note
from hearth.bench.toy_daemon import NO_REUSE
from hearth.bench.vision.asking import CLIENTS, QUESTION, Asker, answers, asker, rates
from hearth.bench.vision.figures import (
    BesideFigures,
    HiddenFigures,
    Looks,
    Span,
    VisionFigures,
    beside_figures,
    hidden_figures,
    missed_aims,
    ratio_of,
    size_figures,
)
from hearth.bench.vision.text_rows import TextRowFigures, measure_text_rows
from hearth.bench.vision.worker import PictureJob, PictureWorker
from hearth.daemon.cli.errors import Failure
from hearth.daemon.configuration.settings import Settings
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Trace, TraceReport
from hearth.daemon.door.finished import FinishedRequest
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.daemon.shipped import VISION
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import physical_cores
from hearth_client import HearthClientError

_QUALITY = 90
_THINGS = 20
_GRAIN = 12.0


class Size(NamedTuple):
    """Width and height in pixels."""

    width: int
    height: int

    @property
    def name(self) -> str:
        """Name of its figures."""
        return f"{self.width}x{self.height}"


SIZES = (Size(224, 224), Size(640, 480), Size(1920, 1080))


def photograph(size: Size, seed: int = 0) -> bytes:
    """A JPEG file: soft light, grain, and things with sharp edges before it."""
    random = np.random.default_rng(seed)
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    light = [127 + 100 * np.sin(x / width * 5 + y / height * 3 + color) for color in range(3)]
    pixels = np.stack(light, -1) + random.normal(0, _GRAIN, (height, width, 3))
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(_THINGS):
        left, top, side = (int(random.integers(0, most)) for most in (*size, max(size)))
        color = tuple(int(value) for value in random.integers(0, 256, 3))
        pen.ellipse((left, top, left + side // 4, top + side // 5), fill=color)
    file = BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def renamed(jpeg: bytes, number: int) -> bytes:
    """The same picture in a file of other bytes, which no cache has."""
    return jpeg + number.to_bytes(8, "big")


_MIDDLE = SIZES[1]
_EXAM, _EXAM_S = "models.evaluate_vision", 120.0
T = TypeVar("T")


class VisionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Subject of a run: an engine folder, and the checkpoint that it was made from for the peer.

    Each size is looked at `rounds` times after a first one that does not count. `seconds` are those
    of each load, `kept` how often a picture that is kept comes again, `passes` and `pictures` those
    of each client of `hidden_share`, whose replies have `tokens` tokens. `row_rounds` batches of
    `row_tokens` tokens show what rows with images cost. `exam` counts the
    questions of each group of the shipped variant's exam.
    """

    engine: Path
    model: Path
    logs: Path
    device: Device = "cpu"
    precision: str = "float32"
    rounds: int = 9
    kept: int = 40
    seconds: float = 6.0
    passes: int = 3
    pictures: int = 8
    tokens: int = 48
    row_rounds: int = 24
    row_tokens: int = 24
    exam: int = 0


class VisionSession:
    """Measures a plan: the parts that have to be there, and those that may fail with a note."""

    def __init__(self, plan: VisionPlan) -> None:
        self._plan = plan
        self._numbers = count()
        self._photographs = {size: photograph(size) for size in SIZES}
        self._notes: list[str] = []
        self._memory: dict[str, float] = {}

    def measure(self) -> VisionFigures:
        """All figures; raises HearthError or Failure where the daemon does not serve pictures."""
        plan = self._plan
        used = gpu_meter() if plan.device == "cuda" else None
        before = used() if used else 0
        # The same picture is asked about again and again.
        flags = ("--log-level", "warning", *NO_REUSE)
        with own_daemon(plan.engine, flags) as daemon, asker(daemon) as asks:
            if used:
                self._memory["daemon_gpu"] = (used() - before) / 1e6
            looks = self._contest(asks)
            cached = self._cached(asks)
            note("text and pictures at once")
            beside = self._tried("beside", lambda: self._beside(daemon))
            note("four clients, new and kept pictures")
            hidden = self._tried("hidden_share", lambda: self._hidden(daemon, asks))
            exam = self._tried("accuracy", lambda: self._exam(daemon)) if plan.exam else None
            self._memory["daemon"] = family_usage(daemon.pid).rss_bytes / 1e6
            daemon.stop()
        note("a text row beside images")
        rows = self._tried("text_row_loss", self._text_rows)
        sizes = {size.name: size_figures(looks[size.name]) for size in SIZES}
        ratios = {name: one.ttft_vs_transformers for name, one in sizes.items()}
        figures = VisionFigures(
            precision=plan.precision,
            sizes=sizes,
            preprocess_vs_transformers=ratio_of(sizes, "preprocess_vs_transformers"),
            preprocess_vs_torchvision=ratio_of(sizes, "preprocess_vs_torchvision"),
            ttft_vs_transformers={name: one for name, one in ratios.items() if one is not None},
            cached_ms=1000 * median(cached),
            cached_p90_ms=1000 * quantiles(cached, n=10)[-1],
            text_row_loss=rows.loss if rows else None,
            hidden_share=hidden.share if hidden else None,
            accuracy=exam["all"] if exam else None,
            accuracy_by_group=exam or {},
            text_rows=rows,
            beside=beside,
            hidden=hidden,
            memory_mb=self._memory,
            notes=self._notes,
        )
        figures.missed = missed_aims(figures)
        return figures

    def _contest(self, asks: Asker) -> dict[str, Looks]:
        """Look at each size by each contender, in turns."""
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="hearth-") as folder:
            workers = self._workers(stack)
            looks = {size.name: Looks() for size in SIZES}
            for turn in range(self._plan.rounds + 1):
                note(f"pictures: round {turn} of {self._plan.rounds}")
                for size in SIZES:
                    file = Path(folder) / size.name
                    file.write_bytes(data := self._new(self._photographs[size]))
                    # The first look finds everything cold.
                    kept = looks[size.name] if turn else Looks()
                    kept.asked.append(asks.ask(data))
                    for name, worker in workers.items():
                        self._look(name, worker, file, kept)
        return looks

    def _workers(self, stack: ExitStack) -> dict[str, PictureWorker]:
        plan, threads = self._plan, physical_cores()
        job = PictureJob(contender="hearth", path=str(plan.engine), threads=threads)
        ours = PictureWorker(job, plan.logs / "vision-hearth.log")
        stack.callback(ours.close)
        peer = PictureJob(
            contender="transformers",
            path=str(plan.model),
            threads=threads,
            device=plan.device,
            precision=plan.precision,
        )
        note("loading transformers")
        theirs = self._tried(
            "transformers", lambda: PictureWorker(peer, plan.logs / "vision-transformers.log")
        )
        if theirs is None:
            return {"hearth": ours}
        stack.callback(theirs.close)
        return {"hearth": ours, "transformers": theirs}

    def _look(self, name: str, worker: PictureWorker, file: Path, looks: Looks) -> None:
        for work in worker.works:
            looked = worker.look(work, file, QUESTION)
            looks.seconds.setdefault(f"{name} {work}", []).append(looked.seconds)
            if work == "first_token":
                looks.token = looked.token
                self._memory[name] = looked.rss_bytes / 1e6
                if looked.gpu_bytes:
                    self._memory[f"{name}_gpu"] = looked.gpu_bytes / 1e6

    def _cached(self, asks: Asker) -> list[float]:
        """Seconds until the embeddings of a kept picture are there."""
        data = self._new(self._photographs[_MIDDLE])
        asks.ask(data)
        again = [asks.ask(data) for _ in range(self._plan.kept)]
        if not all(one.cached for one in again):
            self._notes.append("cached_ms: a picture that came again was encoded again")
        return [one.ready for one in again]

    def _beside(self, daemon: OwnDaemon) -> BesideFigures:
        files = map(self._new, repeat(self._photographs[_MIDDLE]))
        found = [
            uvloop.run(rates(daemon.socket, files, self._plan.seconds, texts=texts, images=images))
            for texts, images in ((CLIENTS, 0), (0, CLIENTS), (CLIENTS, CLIENTS))
        ]
        return beside_figures(*found, nice=Settings().encoder.nice, clients=CLIENTS)

    def _hidden(self, daemon: OwnDaemon, asks: Asker) -> HiddenFigures:
        plan, picture = self._plan, self._photographs[_MIDDLE]
        alone = [asks.ask(self._new(picture)) for _ in range(plan.rounds)]
        new, kept = [], []
        ended: list[FinishedRequest] = []
        for _ in range(plan.passes):
            files = [[self._new(picture) for _ in range(plan.pictures)] for _ in range(CLIENTS)]
            new.append(uvloop.run(answers(daemon.socket, files, plan.tokens)))
            last = Trace(last=CLIENTS * plan.pictures)
            ended += ask(last, TraceReport, str(daemon.socket)).requests
            kept.append(uvloop.run(answers(daemon.socket, files, plan.tokens)))
        return hidden_figures(
            [_encoding(one) for one in ended],
            [_replying(one) for one in ended],
            new=new,
            kept=kept,
            encode_s=median(one.encode for one in alone),
        )

    def _exam(self, daemon: OwnDaemon) -> dict[str, float]:
        """Shares of right answers by group, by the program beside the shipped model."""
        note("the exam")
        given = ("--socket", str(daemon.socket), "--each", str(self._plan.exam), "--json")
        command, folder = [sys.executable, "-m", _EXAM, *given], VISION.parents[1]
        try:
            done = subprocess.run(  # noqa: S603 - fixed
                command, capture_output=True, check=True, cwd=folder, timeout=_EXAM_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise HearthError("invalid_value", f"there was no exam: {error}", "exam") from error
        return msgspec.json.decode(done.stdout, type=dict[str, float])

    def _text_rows(self) -> TextRowFigures:
        plan = self._plan
        with tempfile.TemporaryDirectory(prefix="hearth-") as folder:
            file = Path(folder) / "picture.jpg"
            file.write_bytes(self._photographs[_MIDDLE])
            return measure_text_rows(plan.engine, file, plan.row_rounds, plan.row_tokens)

    def _new(self, jpeg: bytes) -> bytes:
        """A picture that is in no cache yet."""
        return renamed(jpeg, next(self._numbers))

    def _tried(self, name: str, measure: Callable[[], T]) -> T | None:
        """A part of the figures, or None and a note."""
        try:
            return measure()
        except (HearthError, HearthClientError, Failure) as error:
            self._notes.append(f"{name}: {error}")
            note(self._notes[-1])
            return None


def _encoding(request: FinishedRequest) -> Span:
    """Span from a prompt's tokens until the embeddings of its pictures were there."""
    began = request.opened + request.tokenize_s
    return began, began + request.images_s


def _replying(request: FinishedRequest) -> Span:
    """Span from a request's first token to its last."""
    first = _encoding(request)[1] + request.queue_s + request.prefill_s
    return first, first + request.decode_s
