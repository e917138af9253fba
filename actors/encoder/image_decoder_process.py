"""The process that decodes pictures for an encoder.

`python -m hearth.actors.encoder.image_decoder_process SETTINGS`
"""

from __future__ import annotations

import sys
import time

import numpy as np

from hearth.actors.arena import Arena
from hearth.actors.encoder.image_decoder import (
    FAULTS,
    ImageDecodeJob,
    ImageDecodeResult,
    ImageDecodeSettings,
)
from hearth.actors.worker_process import serve, settle
from hearth.runtime.image_processing.decoding import decode, patch


class PatchMaker:
    """Decoder of pictures in one arena that writes their patches into another."""

    def __init__(self, settings: ImageDecodeSettings) -> None:
        self._config = settings.config
        self._pictures = Arena.open(settings.pictures.descriptor, settings.pictures.size)
        self._patches = Arena.open(settings.patches.descriptor, settings.patches.size)

    def __call__(self, job: ImageDecodeJob) -> ImageDecodeResult:
        """Decode, turn upright, resize and cut each picture of a visual that is used.

        Raises `image_*`, and `internal` if a slot was reused meanwhile.
        """
        layout, frames = job.layout, job.frames
        decode_s = resize_s = 0.0
        shape = (layout.patches, self._config.patch_bytes)
        out = self._patches.array(job.patches, shape, np.dtype(np.uint8))
        for place, number in enumerate(layout.frames or (0,)):
            began = time.monotonic()
            one = frames[number]
            pixels = decode(self._pictures.view(one.slot), one.picture)
            decoded = time.monotonic()
            patch(pixels, layout, self._config, out, frame=place)
            self._pictures.check(one.slot)
            decode_s += decoded - began
            resize_s += time.monotonic() - decoded
        self._patches.check(job.patches)
        return ImageDecodeResult(job.number, decode_s=decode_s, resize_s=resize_s)


def main() -> None:
    """Decode until the encoder ends."""
    settings = settle(sys.argv[1], ImageDecodeSettings)
    serve(settings, ImageDecodeJob, ImageDecodeResult, PatchMaker(settings), FAULTS)


if __name__ == "__main__":
    main()
