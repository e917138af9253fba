"""The process that decodes pictures for an encoder.

`python -m hearth.actors.encoder.image_decoder_process SETTINGS`
"""

from __future__ import annotations

import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from hearth.actors.arena import Arena
from hearth.actors.encoder.image_decoder import (
    PACKET_BYTES,
    ImageDecodeJob,
    ImageDecodeResult,
    ImageDecodeSettings,
)
from hearth.actors.own_process import die_first, die_with, ignore_signals
from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.decoding import decode, patch

Work = Callable[[ImageDecodeJob], ImageDecodeResult]


def serve(settings: ImageDecodeSettings, work: Work) -> None:
    """Do one job after the other until the encoder closes the channel."""
    _limit_memory(settings.memory)
    decoder, encode = msgspec.msgpack.Decoder(ImageDecodeJob), msgspec.msgpack.encode
    # An encoder that was killed with unread results shows as an error.
    with suppress(ConnectionError), socket.socket(fileno=settings.channel) as channel:
        channel.send(encode(ImageDecodeResult()))
        while data := channel.recv(PACKET_BYTES):
            job = decoder.decode(data)
            try:
                result = work(job)
            except HearthError as error:
                result = ImageDecodeResult(job.number, code=error.code, message=error.message)
            except MemoryError:
                what = "the picture needs more memory than decoding may take"
                result = ImageDecodeResult(job.number, code="image_too_large", message=what)
            except Exception:  # noqa: BLE001 - answered, and shown where the daemon's output goes
                traceback.print_exc()
                what = "a picture could not be prepared: the log tells why"
                result = ImageDecodeResult(job.number, code="encoder_failed", message=what)
            channel.send(encode(result))


def settle(argument: str) -> ImageDecodeSettings:
    """Read the settings of this process, and tie its life to its parent's."""
    settings = msgspec.json.decode(argument, type=ImageDecodeSettings)
    ignore_signals()
    die_with(settings.parent)
    die_first()
    # A core dump of a broken decoder is of no use.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return settings


def _limit_memory(beside: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + beside
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


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
        return ImageDecodeResult(job.number, decode_s, resize_s)


def main() -> None:
    """Decode until the encoder ends."""
    settings = settle(sys.argv[1])
    serve(settings, PatchMaker(settings))


if __name__ == "__main__":
    main()
