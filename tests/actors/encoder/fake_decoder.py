"""A process that decodes nothing: what it does with a job follows from the job's height."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hearth.actors.encoder.image_decoder import (
    FAULTS,
    ImageDecodeJob,
    ImageDecodeResult,
    ImageDecodeSettings,
)
from hearth.actors.worker_process import serve, settle
from hearth.runtime.errors import HearthError

PROGRAM = (str(Path(__file__).resolve()),)
"""Arguments of Python that run this file: processes of the encoder start where Hearth lies."""


FINE, DIES, HANGS, GRABS, REFUSES, FAILS, DIES_LATER = range(7)
_jobs: list[int] = []


def work(job: ImageDecodeJob) -> ImageDecodeResult:
    _jobs.append(job.number)
    kind = job.layout.height
    if kind == DIES or (kind == DIES_LATER and len(_jobs) > 1):
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == HANGS:
        time.sleep(3600)
    if kind == GRABS:
        np.ones(1 << 28, np.uint8)
    if kind == REFUSES:
        raise HearthError("image_invalid", "as asked")
    if kind == FAILS:
        raise KeyError
    return ImageDecodeResult(job.number, decode_s=float(os.getpid()))


if __name__ == "__main__":
    settings = settle(sys.argv[1], ImageDecodeSettings)
    serve(settings, ImageDecodeJob, ImageDecodeResult, work, FAULTS)
