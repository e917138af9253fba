"""Client of the process that decodes pictures, which it replaces when it fails; their messages."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

import hearth
from hearth.actors.arena import SharedArena
from hearth.actors.messages import ImageInput
from hearth.runtime.errors import HearthError
from hearth.runtime.images import ImageLayout, Slot
from hearth.runtime.vision_config import VisionConfig

PACKET_BYTES = 200 << 10
"""Bytes of the longest message, a job of a video of 4,096 frames; each message is one packet."""
NO_JOB = -1


class ImageDecodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of the process: its end of the channel, the arenas, and its limits.

    Once ready the process may take `memory` bytes more of address space.
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
    """Result of a job: patches, or `code` and `message`; the first, of no job, means ready."""

    number: int = NO_JOB
    decode_s: float = 0.0
    resize_s: float = 0.0
    code: str = ""
    message: str = ""


START_S = 60.0
"""Seconds that a process may take until it is ready."""
PROGRAM = ("-m", "hearth.actors.encoder.image_decoder_process")
STARTS = 3
"""Number of processes in a row that may end before they are ready."""
_AHEAD = 2
"""Number of jobs sent ahead, so that the process need not wait for the next."""
_MOST_S = 1.0
"""Most seconds that count of the time between two polls: a suspended machine is no timeout."""
_KILL_S = 5.0
# The same code as here, and not whatever lies in the folder where the daemon was started.
_SOURCE = Path(hearth.__file__).resolve().parents[1]


class ImageDecoder:
    """Non-blocking client of a process that decodes pictures, one job after the other.

    A process that dies or takes longer than `timeout_s` for a picture is replaced. Its current job
    fails, unless the process had done other jobs, which may be the cause of its death: then the job
    is retried once, as the first of a new process. Waiting jobs go on there.
    """

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
        self._config, self._pictures, self._patches = config, pictures, patches
        self._timeout_s = timeout_s
        self._memory = memory
        self._program = program
        self._clock = clock
        self._decoder = msgspec.msgpack.Decoder(ImageDecodeResult)
        self._waiting: deque[ImageDecodeJob] = deque()
        self._given: deque[ImageDecodeJob] = deque()
        # Seconds that the process has spent on its start or its job, as of the last poll.
        self._spent_s = self._seen = 0.0
        self._starts = 0
        self._start()

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable when there are results."""
        return self._channel.fileno()

    def give(self, job: ImageDecodeJob) -> None:
        """Append a job."""
        self._waiting.append(job)
        self._hand_over()

    def drop(self, numbers: Iterable[int]) -> list[int]:
        """Remove jobs that the process has not been sent; returns their numbers."""
        gone = {job.number for job in self._waiting}.intersection(numbers)
        self._waiting = deque(job for job in self._waiting if job.number not in gone)
        return sorted(gone)

    def poll(self) -> list[ImageDecodeResult]:
        """Results since the last poll; to be called at least once a second while there are jobs.

        Raises `encoder_failed` if `STARTS` processes in a row have not become ready.
        """
        results, alive = self._read()
        now = self._clock()
        self._spent_s += min(now - self._seen, _MOST_S)
        self._seen = now
        if results:
            self._spent_s = 0.0
        if not alive:
            results += self._bury()
        elif self._ready and not self._given:
            self._spent_s = 0.0
        elif self._spent_s > self._limit_s():
            results += self._end_stuck()
        self._hand_over()
        return results

    def wait_ready(self) -> None:
        """Block until the process is ready; raises `encoder_failed`."""
        while not self._ready:
            select.select([self._channel], [], [], _MOST_S)
            self.poll()

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)

    def _start(self) -> None:
        self._channel, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
        settings = ImageDecodeSettings(
            channel=end.fileno(),
            parent=os.getpid(),
            pictures=self._pictures,
            patches=self._patches,
            config=self._config,
            memory=self._memory,
        )
        with end:
            self._process = subprocess.Popen(  # noqa: S603 - our own program and settings
                [sys.executable, *self._program, msgspec.json.encode(settings).decode()],
                stdin=subprocess.DEVNULL,
                cwd=_SOURCE,
                pass_fds=(end.fileno(), self._pictures.descriptor, self._patches.descriptor),
                # Nothing is multiplied there, and each thread would take addresses.
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
        self._ready = False
        self._starts += 1
        self._done = 0
        self._spent_s = 0.0
        self._seen = self._clock()

    def _hand_over(self) -> None:
        while self._ready and self._waiting and len(self._given) < _AHEAD:
            try:
                self._channel.send(msgspec.msgpack.encode(self._waiting[0]))
            except OSError:
                # Full, or the process has died, which is read next.
                return
            if not self._given:
                self._spent_s = 0.0
            self._given.append(self._waiting.popleft())

    def _read(self) -> tuple[list[ImageDecodeResult], bool]:
        """The results that have come, and True while the process may send more."""
        results: list[ImageDecodeResult] = []
        while True:
            try:
                data = self._channel.recv(PACKET_BYTES)
            except BlockingIOError:
                return results, True
            except ConnectionResetError:
                # It died before it had read all; its results are still to come.
                continue
            if not data:
                return results, False
            result = self._decoder.decode(data)
            if result.number == NO_JOB:
                self._ready, self._starts = True, 0
                continue
            self._given.popleft()
            self._done += 1
            results.append(result)

    def _limit_s(self) -> float:
        if not self._ready:
            return START_S
        return self._timeout_s * max(1, len(self._given[0].layout.frames))

    def _end_stuck(self) -> list[ImageDecodeResult]:
        if not self._ready:
            raise _no_start("is not ready in time")
        job = self._given.popleft()
        self._replace()
        what = f"a picture took longer than {self._timeout_s:g} s to decode"
        return [ImageDecodeResult(job.number, code="image_timeout", message=what)]

    def _bury(self) -> list[ImageDecodeResult]:
        if not self._ready and self._starts >= STARTS:
            raise _no_start("ended at once")
        blamed = [self._given.popleft()] if self._given and not self._done else []
        self._replace()
        what = "the picture ended the process that decoded it"
        return [ImageDecodeResult(job.number, code="image_invalid", message=what) for job in blamed]

    def _replace(self) -> None:
        self.close()
        self._waiting.extendleft(reversed(self._given))
        self._given.clear()
        self._start()


def _no_start(what: str) -> HearthError:
    return HearthError(
        "encoder_failed", f"the process that decodes pictures {what}: the daemon's log tells why"
    )
