"""`transformers` from the bytes of a picture to the input of its tower, and to a first token."""

import inspect
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import torch
import transformers
from PIL import Image

from hearth.bench.vision.worker import PictureJob, Work
from hearth.runtime.errors import HearthError

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
