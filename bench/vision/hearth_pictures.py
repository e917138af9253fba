"""Hearth's way from the bytes of a picture to the input of its tower, in this process."""

from pathlib import Path

import numpy as np

from hearth.bench.vision.worker import PictureJob, Work
from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.decoding import decode, patch
from hearth.runtime.image_processing.headers import read_header
from hearth.runtime.image_processing.sizes import layout_of
from hearth.runtime.vision_config import load_vision_config


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
