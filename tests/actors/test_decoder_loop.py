from __future__ import annotations

import socket

import msgspec
import pytest

from hearth.actors.arena import SharedArena
from hearth.actors.encoder import image_decoder_process
from hearth.actors.encoder.image_decoder_jobs import (
    ImageDecodeJob,
    ImageDecodeResult,
    ImageDecodeSettings,
)
from hearth.runtime.images import ImageLayout, Slot
from tests.runtime.vision.tower_config import config_of


def test_the_end_of_an_encoder_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_decoder_process, "_limit_memory", lambda _: None)
    encoder, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nothing = SharedArena(-1, 0)
    settings = ImageDecodeSettings(
        channel=channel.detach(),
        parent=0,
        pictures=nothing,
        patches=nothing,
        config=config_of("qwen3_vl"),
        memory=0,
    )
    job = ImageDecodeJob(
        1, [], ImageLayout(height=2, width=2, grid=(1, 2, 2), tokens=1), Slot(0, 0, 1)
    )
    encoder.send(msgspec.msgpack.encode(job))
    done: list[int] = []

    def work(job: ImageDecodeJob) -> ImageDecodeResult:
        # With a word unread, as where it is killed.
        encoder.close()
        done.append(job.number)
        return ImageDecodeResult(job.number)

    image_decoder_process.serve(settings, work)
    assert done == [1]
