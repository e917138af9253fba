"""Client of the process that decodes pictures, and their messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hearth.actors.arena import SharedArena
from hearth.actors.messages import ImageInput
from hearth.actors.worker_process import (
    Fault,
    Job,
    JobResult,
    WorkerFaults,
    WorkerProcess,
    WorkerSettings,
)
from hearth.runtime.images import ImageLayout, Slot
from hearth.runtime.vision_config import VisionConfig


class ImageDecodeSettings(WorkerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of the process, with the arenas."""

    pictures: SharedArena
    patches: SharedArena
    config: VisionConfig


class ImageDecodeJob(Job, frozen=True, array_like=True):
    """Make patches of a picture or a video."""

    frames: list[ImageInput]
    layout: ImageLayout
    patches: Slot


class ImageDecodeResult(JobResult, frozen=True, array_like=True):
    """Result of a job: patches."""

    decode_s: float = 0.0
    resize_s: float = 0.0


PROGRAM = ("-m", "hearth.actors.encoder.image_decoder_process")
FAULTS = WorkerFaults(
    "the process that decodes pictures",
    start="encoder_failed",
    died=Fault("image_invalid", "the picture ended the process that decoded it"),
    late=Fault("image_timeout", "a picture took too long to decode"),
    memory=Fault("image_too_large", "the picture needs more memory than decoding may take"),
    other=Fault("encoder_failed", "a picture could not be prepared: the log tells why"),
)


class ImageDecoder(WorkerProcess[ImageDecodeJob, ImageDecodeResult]):
    """Client of a process that decodes pictures, each frame in `timeout_s` at the most."""

    def __init__(
        self,
        config: VisionConfig,
        pictures: SharedArena,
        patches: SharedArena,
        *,
        timeout_s: float,
        memory: int,
        program: Sequence[str] = PROGRAM,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        late = Fault("image_timeout", f"a picture took longer than {timeout_s:g} s to decode")
        super().__init__(
            program,
            ImageDecodeSettings(pictures=pictures, patches=patches, config=config, memory=memory),
            ImageDecodeResult,
            lambda job: timeout_s * max(1, len(job.layout.frames)),
            FAULTS._replace(late=late),
            descriptors=(pictures.descriptor, patches.descriptor),
            clock=clock,
        )
