"""Who is timed over pictures, in a process of its own: thread pools and memory stay apart."""

import inspect
import os
import time
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch
import transformers
from PIL import Image

from hearth.bench.child_process import ChildProcess, ParentProcess, family_usage
from hearth.bench.contenders.contender import Device
from hearth.bench.contenders.worker import PACKAGES, missing
from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.decoding import decode
from hearth.runtime.image_processing.headers import read_header
from hearth.runtime.image_processing.patches import patch
from hearth.runtime.image_processing.sizes import layout_of
from hearth.runtime.vision_config import load_vision_config

Work = Literal["patches", "torchvision", "first_token"]
"""From a file to the tower's input, by the fastest processor or torchvision's, or to a token."""
_LOAD_TIMEOUT_S = 120.0
_LOOK_TIMEOUT_S = 60.0
_CLASSES = {
    "hearth": "hearth.bench.vision.worker:HearthPictures",
    "transformers": "hearth.bench.vision.worker:TransformersPictures",
}


class PictureJob(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a contender: an engine folder, or that of a checkpoint."""

    contender: Literal["hearth", "transformers"]
    path: str
    device: Device = "cpu"
    threads: int = 1
    precision: str = "float32"


class Look(msgspec.Struct, frozen=True):
    """Do this with a picture's file, which is read before the time begins, and a question."""

    work: Work
    file: str
    text: str = ""


class Looked(msgspec.Struct, frozen=True, tag=True):
    """The seconds that it took, the token that came of it, and the process's memory in bytes.

    At first, when the contender is open, what it can do.
    """

    seconds: float = 0.0
    token: int = 0
    rss_bytes: int = 0
    gpu_bytes: int = 0
    works: list[Work] = []


class PictureContender(Protocol):
    """Contender that a worker drives."""

    works: list[Work]

    def do(self, work: Work, data: bytes, text: str) -> int:
        """Do a piece of work; the token, 0 where none comes of it."""

    def gpu_bytes(self) -> int:
        """Bytes that its library has taken of the GPU's memory, the context apart."""


class PictureWorker:
    """A contender, open when the constructor returns; what its libraries print goes to `log`.

    Raises HearthError where it cannot run.
    """

    def __init__(self, job: PictureJob, log: Path) -> None:
        threads = str(job.threads)
        environ = {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = ChildProcess("hearth.bench.vision.worker", job, log, environ)
        try:
            ready: Looked = self._process.receive(Looked, _LOAD_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.works = ready.works

    def look(self, work: Work, file: Path, text: str = "") -> Looked:
        """Do a piece of work; raises HearthError when nothing comes of it in time."""
        self._process.send(Look(work, str(file), text))
        looked: Looked = self._process.receive(Looked, _LOOK_TIMEOUT_S)
        return looked

    def close(self) -> None:
        """End the process."""
        self._process.close()


def main() -> None:
    """Serve as the child: open the job's contender, then answer each `Look`."""
    parent = ParentProcess()
    try:
        contender = _opened(parent.job(PictureJob))
        parent.send(Looked(works=contender.works))
        while (look := parent.receive(Look)) is not None:
            data = Path(look.file).read_bytes()
            started = time.perf_counter()
            token = contender.do(look.work, data, look.text)
            seconds = time.perf_counter() - started
            used = family_usage(os.getpid()).rss_bytes
            parent.send(Looked(seconds, token, used, contender.gpu_bytes()))
    except HearthError as error:
        parent.refuse(error)


def _opened(job: PictureJob) -> PictureContender:
    module, _, name = _CLASSES[job.contender].partition(":")
    try:
        opened: PictureContender = getattr(import_module(module), name)(job)
    except ImportError as error:
        if error.name not in PACKAGES:
            raise
        raise HearthError("unsupported_option", missing([error.name]), "peer") from error
    return opened


if __name__ == "__main__":
    main()


class HearthPictures:
    """Work of the decoder process on a picture, without its memory files."""

    def __init__(self, job: PictureJob) -> None:
        config = load_vision_config(Path(job.path))
        if config is None:
            raise HearthError("unsupported_option", "this model takes no images", "engine")
        self._config = config
        self.works: list[Work] = ["patches"]

    def do(self, work: Work, data: bytes, text: str) -> int:  # noqa: ARG002 - as all contenders
        """Patches of a file."""
        if work != "patches":
            raise HearthError("internal", f"Hearth does {work} in its daemon")
        picture = read_header(memoryview(data))
        layout = layout_of(picture, self._config)
        out = np.empty((layout.patches, self._config.patch_bytes), np.uint8)
        patch(decode(memoryview(data), picture), layout, self._config, out)
        return 0

    def gpu_bytes(self) -> int:
        """Zero: the work needs no GPU."""
        return 0


_FAMILIES = ("qwen3_vl", "qwen2_5_vl")


class TransformersPictures:
    """Image processor, tokenizer and model of a folder.

    The processor of whole prompts needs torchvision, so theirs are put together here; raises
    `unsupported_option` for a family whose prompts are not those of Qwen.
    """

    def __init__(self, job: PictureJob) -> None:
        torch.set_num_threads(job.threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        found = transformers.AutoModelForImageTextToText.from_pretrained(
            job.path, dtype=getattr(torch, job.precision)
        )
        self._model: Any = found.eval().to(job.device)
        config = self._model.config
        if config.model_type not in _FAMILIES:
            text = f"the peer's prompts are made for {' and '.join(_FAMILIES)} alone"
            raise HearthError("unsupported_option", text, "model")
        self._device = job.device
        self._image = config.image_token_id
        self._merged = config.vision_config.spatial_merge_size**2
        self._wants_types = "mm_token_type_ids" in inspect.signature(found.forward).parameters
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(job.path)
        self._pad = self._tokenizer.convert_ids_to_tokens(self._image)
        self._processors: dict[Work, Any] = {"patches": _pillow_processor(job.path)}
        if find_spec("torchvision") is not None:
            processors: Any = transformers.AutoImageProcessor
            self._processors["torchvision"] = processors.from_pretrained(job.path)
        self.works: list[Work] = ["first_token", *self._processors]

    def do(self, work: Work, data: bytes, text: str) -> int:
        """Pixel values of a file, or the likeliest token behind a question about it."""
        image = Image.open(BytesIO(data)).convert("RGB")
        if work != "first_token":
            self._processors[work](image, return_tensors="pt")
            return 0
        given = self._processors["patches"](image, return_tensors="pt")
        turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        asked = self._tokenizer.apply_chat_template(
            [turn], tokenize=False, add_generation_prompt=True
        )
        tokens = int(given["image_grid_thw"].prod()) // self._merged
        asked = asked.replace(self._pad, self._pad * tokens)
        ids = self._tokenizer(asked, return_tensors="pt")["input_ids"].to(self._device)
        types = {"mm_token_type_ids": (ids == self._image).int()} if self._wants_types else {}
        with torch.inference_mode():
            answer = self._model(
                input_ids=ids,
                pixel_values=given["pixel_values"].to(self._device),
                image_grid_thw=given["image_grid_thw"].to(self._device),
                use_cache=True,
                logits_to_keep=1,
                **types,
            )
            return int(answer.logits[0, -1].argmax())

    def gpu_bytes(self) -> int:
        """Bytes that PyTorch has reserved."""
        return torch.cuda.max_memory_reserved() if self._device == "cuda" else 0


def _pillow_processor(path: str) -> Any:
    """The one that needs no torchvision, as this version of transformers names it."""
    processors: Any = transformers.AutoImageProcessor
    try:
        return processors.from_pretrained(path, backend="pil")
    except (ImportError, TypeError, ValueError):
        return processors.from_pretrained(path, use_fast=False)
