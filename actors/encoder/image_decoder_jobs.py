"""Messages between the encoder and its process for image decoding."""

from __future__ import annotations

import msgspec

from hearth.actors.arena import SharedArena
from hearth.actors.messages import ImageInput
from hearth.runtime.images import ImageLayout, Slot
from hearth.runtime.vision_config import VisionConfig

PACKET_BYTES = 200 << 10
"""The longest message, that of a video of 4,096 frames; one is one packet."""
NO_JOB = -1


class ImageDecodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of the process: its end of the channel, the arenas, and its limits.

    It may take `memory` bytes of addresses beside those that it has when it is ready.
    """

    channel: int
    parent: int
    pictures: SharedArena
    patches: SharedArena
    config: VisionConfig
    memory: int


class ImageDecodeJob(msgspec.Struct, frozen=True, array_like=True):
    """Make patches of a picture or a video; answered by one `ImageDecodeResult`, in order."""

    number: int
    frames: list[ImageInput]
    layout: ImageLayout
    patches: Slot


class ImageDecodeResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of a job: patches, or `code` and `message`. The first one, of no job, is readiness."""

    number: int = NO_JOB
    decode_s: float = 0.0
    resize_s: float = 0.0
    code: str = ""
    message: str = ""
