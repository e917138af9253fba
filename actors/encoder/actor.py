"""The encoder: makes patches of pictures in shared memory, and on a CPU their embeddings."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from msgspec import structs
from numpy.typing import NDArray

from hearth.actors.addresses import CONTROL_LIMIT, WORK_LIMIT
from hearth.actors.arena import Arena
from hearth.actors.encoder.image_decoder import ImageDecodeJob, ImageDecoder, ImageDecodeResult
from hearth.actors.executor.vision_encoder_memory import VisionEncoderMemory
from hearth.actors.logs import set_level
from hearth.actors.mailbox import MailboxFull, Receiver, Sender, wait_any
from hearth.actors.messages import (
    DropWork,
    Encode,
    Encoded,
    EncodeFailed,
    EncoderControl,
    EncoderMessage,
    ImageTimes,
    Patched,
    SchedulerMessage,
    SetLogLevel,
    Shutdown,
)
from hearth.actors.roles import EncoderSettings, Host, ReadyActor
from hearth.actors.supervisor_messages import ActorProgress, SupervisorMessage
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.engine_folder import check_identity, verify_folder
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.tower_answer import check_tower_answer
from hearth.runtime.undo import undoing
from hearth.runtime.vision.tower_inputs import Call, plan_calls, sharing
from hearth.runtime.vision.vision_runner import Patches, VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER, VisionConfig, load_vision_config

SEND_TIMEOUT_S = 10.0
"""Seconds for which a send to the scheduler may block before the encoder gives up."""
PROGRESS_S = 1.0
"""Seconds between two signs of progress, while working and while waiting."""
CALL_S = 600.0
"""Seconds that a call of the vision encoder may take while progress is still reported."""
FAILURE_LIMIT = 3
"""Failures of the vision encoder in a row, after which the actor ends and is replaced."""
_log = structlog.get_logger("encoder")


class Tower(NamedTuple):
    """A vision encoder that runs in this process, and the memory that it reads and writes."""

    runner: VisionRunner
    memory: VisionEncoderMemory


class _Patched(NamedTuple):
    work: Encode
    times: ImageTimes


class EncoderActor:
    """The encoder's loop on one thread, with a second thread that runs the vision encoder.

    Every piece of work is answered once. The actor owns its arguments, except `to_supervisor`.
    Without `tower` this actor makes patches only, and the executor runs the vision encoder.
    """

    def __init__(
        self,
        *,
        name: str,
        inbox: Receiver[EncoderMessage],
        control: Receiver[EncoderControl],
        to_scheduler: Sender[SchedulerMessage],
        to_supervisor: Sender[SupervisorMessage],
        decoder: ImageDecoder,
        tower: Tower | None,
    ) -> None:
        self._name = name
        self._inbox = inbox
        self._control = control
        self._to_scheduler = to_scheduler
        self._to_supervisor = to_supervisor
        self._decoder = decoder
        self._tower = tower
        self._undecoded: dict[int, Encode] = {}
        self._patched: deque[_Patched] = deque()
        # Numbers in the running batch, and those of it and of the decoder's that were dropped.
        self._embedding: set[int] = set()
        self._dropped: set[int] = set()
        self._failures = 0
        self._broken = False
        self._stopping = False
        self._reported = float("-inf")
        self._silent_from = float("inf")
        self._thread = ThreadPoolExecutor(1)
        self._ended = os.eventfd(0)

    def run(self) -> None:
        """Work until `Shutdown`; raises HearthError after `FAILURE_LIMIT` failures in a row."""
        with self._inbox, self._control, self._to_scheduler:
            try:
                self._poll()
                while not self._stopping:
                    if self._patched and self._tower is not None:
                        self._embed(self._tower, self._next_batch(self._tower))
                    else:
                        descriptors = [self._decoder.descriptor]
                        wait_any([self._inbox, self._control], PROGRESS_S, descriptors)
                    self._poll()
            finally:
                self._decoder.close()
                self._thread.shutdown()
                os.close(self._ended)
                if self._tower is not None:
                    self._tower.runner.close()

    def _poll(self) -> None:
        """Report progress, and handle the messages and decoded pictures that have come."""
        self._report()
        while (control := self._control.receive_nowait()) is not None:
            match control:
                case SetLogLevel(level):
                    set_level(level)
                case Shutdown():
                    self._stopping = True
        while (message := self._inbox.receive_nowait()) is not None:
            match message:
                case Encode(number, work, patches) if number not in self._undecoded:
                    self._undecoded[number] = message
                    self._decoder.give(
                        ImageDecodeJob(number, work.visual.frames, work.layout, patches)
                    )
                case DropWork(numbers):
                    self._drop(frozenset(numbers))
        for result in self._decoder.poll():
            self._decoded(self._undecoded.pop(result.number), result)

    def _drop(self, numbers: frozenset[int]) -> None:
        dropped = [self._undecoded.pop(number) for number in self._decoder.drop(numbers)]
        dropped += [one.work for one in self._patched if one.work.number in numbers]
        self._patched = deque(one for one in self._patched if one.work.number not in numbers)
        self._dropped |= numbers & (self._undecoded.keys() | self._embedding)
        self._cancel(dropped)

    def _cancel(self, works: Iterable[Encode]) -> None:
        for work in works:
            self._answer(EncodeFailed(work.number, "cancelled", "nobody waits for it any more"))

    def _decoded(self, work: Encode, result: ImageDecodeResult) -> None:
        times = ImageTimes(result.decode_s, result.resize_s)
        if work.number in self._dropped:
            self._cancel([work])
        elif result.code:
            _log.info(
                "a picture failed", number=work.number, code=result.code, reason=result.message
            )
            self._answer(EncodeFailed(work.number, result.code, result.message))
        elif self._tower is None:
            self._answer(Patched(work.number, times))
        else:
            self._patched.append(_Patched(work, times))

    def _next_batch(self, tower: Tower) -> list[_Patched]:
        layouts = [one.work.work.layout for one in self._patched]
        count = sharing(layouts, tower.runner.config)
        batch = list(islice(self._patched, count))
        for _ in batch:
            self._patched.popleft()
        return batch

    def _embed(self, tower: Tower, batch: Sequence[_Patched]) -> None:
        """Run the vision encoder over a batch; if a batch of several fails, over each alone."""
        began = time.monotonic()
        works = [one.work for one in batch]
        self._embedding = {work.number for work in works}
        try:
            done = self._run(tower, works)
        except Exception as error:
            if self._broken:
                raise
            if len(batch) == 1:
                self._fail(batch[0].work, error)
            else:
                _log.warning("pictures failed together", exc_info=error)
                for one in batch:
                    self._embed(tower, [one])
            return
        finally:
            self._embedding = set()
        if not done:
            self._cancel(works)
            return
        self._failures = 0
        seconds = time.monotonic() - began
        patches = sum(one.work.work.layout.patches for one in batch)
        for work, times in batch:
            engine_s = seconds * work.work.layout.patches / patches
            spent = ImageTimes(times.decode_s, times.resize_s, engine_s)
            self._answer(Encoded(work.number, spent))

    def _run(self, tower: Tower, works: Sequence[Encode]) -> bool:
        """Encode a batch; False if it was left, as all of it was dropped or the actor stops."""
        memory, layouts = tower.memory, [work.work.layout for work in works]
        arrays = [memory.arrays(one.work.layout, one.patches, one.target) for one in works]
        images, out = [given for given, _ in arrays], [target for _, target in arrays]
        for call in plan_calls(layouts, memory.config):
            if self._stopping or self._embedding <= self._dropped:
                return False
            self._call(tower, call, images, out)
        for work in works:
            memory.check(work.patches, work.target)
        return True

    def _call(
        self, tower: Tower, call: Call, images: Sequence[Patches], out: Sequence[NDArray[Any]]
    ) -> None:
        """Run one call of the vision encoder, handling messages and decoded pictures meanwhile."""
        self._silent_from = time.monotonic() + CALL_S
        running = self._thread.submit(tower.runner.run, call, images, out)
        running.add_done_callback(lambda _: os.eventfd_write(self._ended, 1))
        try:
            while not running.done():
                descriptors = [self._decoder.descriptor, self._ended]
                wait_any([self._inbox, self._control], PROGRESS_S, descriptors)
                self._poll()
        except BaseException:
            # That was not the vision encoder.
            self._broken = True
            raise
        finally:
            os.eventfd_read(self._ended)
        self._silent_from = float("inf")
        running.result()

    def _fail(self, work: Encode, error: Exception) -> None:
        """Answer for a picture that failed alone; raises after `FAILURE_LIMIT` in a row."""
        _log.error("the vision tower failed", number=work.number, exc_info=error)
        if isinstance(error, HearthError):
            code, message = str(error.code), error.message
        else:
            code, message = "encoder_failed", "the encoder failed: send the request again"
        self._answer(EncodeFailed(work.number, code, message))
        self._failures += 1
        if self._failures >= FAILURE_LIMIT:
            raise HearthError(
                "encoder_failed", f"the encoder failed {self._failures} times in a row: it ends"
            ) from error

    def _answer(self, message: Patched | Encoded | EncodeFailed) -> None:
        self._dropped.discard(message.number)
        self._to_scheduler.send_blocking(message, SEND_TIMEOUT_S)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported < PROGRESS_S or now > self._silent_from:
            return
        self._reported = now
        try:
            self._to_supervisor.post(ActorProgress(self._name))
        except MailboxFull:
            # A supervisor that is behind has unread signs of progress enough.
            _log.debug("the supervisor is behind")


_FLUSH_S = 2.0


def open_encoder(host: Host, settings: EncoderSettings) -> ReadyActor:
    """Start the decoder's process, open the vision encoder on a CPU; raises HearthError."""
    started = time.monotonic()
    # Also that of the decoder's process.
    os.nice(settings.own.nice)
    check_identity(Path(settings.engine), settings.identity)
    config = load_vision_config(Path(settings.engine))
    if config is None:
        raise HearthError("engine_missing", f"{settings.engine} has no vision tower", "engine")
    with undoing() as undo:
        decoder = ImageDecoder(
            config,
            settings.pictures,
            settings.patches,
            timeout_s=settings.own.image_decode_timeout_s,
            memory=settings.own.image_decode_memory_bytes,
        )
        undo.callback(decoder.close)
        tower = None
        asked = settings.options.device
        if (config.device if asked == "auto" else asked) == "cpu":
            tower = _open_tower(settings, config)
            undo.callback(tower.runner.close)
        decoder.wait_ready()
    addresses, context = host.addresses, host.context
    actor = EncoderActor(
        name=host.name,
        inbox=Receiver(context, [addresses.work], EncoderMessage, WORK_LIMIT),
        control=Receiver(context, [addresses.control], EncoderControl, CONTROL_LIMIT),
        to_scheduler=Sender(context, addresses.scheduler, WORK_LIMIT, _FLUSH_S),
        to_supervisor=host.to_supervisor,
        decoder=decoder,
        tower=tower,
    )
    return ReadyActor(actor.run, {"load_s": round(time.monotonic() - started, 3)})


def _open_tower(settings: EncoderSettings, config: VisionConfig) -> Tower:
    """The vision encoder of the engine folder, checked by its known answer."""
    options, folder = settings.options, Path(settings.engine) / VISION_FOLDER
    verify_folder(folder, config, digests=options.verify)
    threads = EngineOptions(threads=settings.own.threads, spin=options.spin)
    with undoing() as undo:
        runner = VisionRunner.open(folder, config, threads, CpuDevice())
        undo.callback(runner.close)
        if options.verify:
            report = check_tower_answer(runner, folder)
            _log.info("the vision tower's known answer is right", **structs.asdict(report))
        else:
            _log.warning("the vision tower's known answer is not compared", reason="verify is off")
        arenas = (
            Arena.open(one.descriptor, one.size) for one in (settings.patches, settings.embeddings)
        )
        return Tower(runner, VisionEncoderMemory(config, *arenas))
