from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hearth.actors.arena import ArenaSlots, slot_bytes
from hearth.actors.messages import (
    DropWork,
    Embedded,
    Encode,
    Encoded,
    EncodeFailed,
    EncoderLost,
    EncoderReady,
    Failed,
    ImageTimes,
    Patched,
    PromptImage,
    RunVisionEncoder,
)
from hearth.actors.scheduler.admission import TEXT_ONLY, Refusal, within_share
from hearth.actors.scheduler.embedding_store import SlotState, StoredEmbeddings
from hearth.actors.scheduler.quarantine import Quarantine
from hearth.actors.scheduler.request_state import RequestState
from hearth.actors.scheduler.waiting_queue import RequestQueues
from hearth.runtime.images import EmbeddedImage, ImageLayout, Slot

IN_FLIGHT = 8
"""Pieces of work in flight: a few calls of a vision encoder, so that it never waits."""

ImageEvent = Patched | Encoded | EncodeFailed | EncoderReady | EncoderLost
"""Messages of encoder and executor about images."""
IsOpen = Callable[[int], bool]
"""Predicate: True if the request of this number has not ended."""
Sent = Encode | DropWork | RunVisionEncoder | Embedded | Failed
"""Decisions, sent to encoder (Encode, DropWork), executor, front door (Embedded) or tokenizer."""


class ImageArenas(NamedTuple):
    """Allocators of the memory for images, and the bytes of a patch and of a token's embedding."""

    patches: ArenaSlots
    embeddings: ArenaSlots
    patch_bytes: int
    token_bytes: int


@dataclass(slots=True)
class _Job:
    """A piece of work that has been sent for the request `sender`, and the stage that it is at."""

    key: bytes
    sender: int
    layout: ImageLayout
    patches: Slot
    at: Literal["encoder", "between", "tower"] = "encoder"
    times: ImageTimes = field(default_factory=ImageTimes)
    dropped: bool = False


class EncoderScheduler:
    """Scheduling of image encoding, which precedes a request's turn in the queue; no clock, no I/O.

    Requests wait here in the order of the queue until all of their embeddings are ready. Each
    piece of work is sent once, for all requests that need it. If it fails these requests fail,
    unless its sender has ended: then the picture's bytes may be gone, and the next request sends
    its own. If encoder or executor die with a piece of work, the requests that needed it are
    suspects, which `take_lost` returns; the pictures of a suspect are sent alone. An arena slot to
    which an encoder or executor may write is reused after its answer, or once the next incarnation
    is ready.
    """

    def __init__(
        self, queues: RequestQueues, quarantine: Quarantine, arenas: ImageArenas | None = None
    ) -> None:
        self._waiting, self._queue = queues.unready, queues.queue
        self._quarantine = quarantine
        self._lost: list[RequestState] = []
        self._alone = False
        self._arenas = arenas or ImageArenas(ArenaSlots(0), ArenaSlots(0), 0, 0)
        self._sees = arenas is not None
        self._store = StoredEmbeddings(self._arenas.embeddings)
        self._numbers = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        # Requests that have pinned embeddings, in the order of their admission.
        self._pinning: list[RequestState] = []
        self._abandoned: dict[str, list[_AbandonedSlots]] = {"encoder": [], "tower": []}
        self._present = {"encoder": False, "tower": False}
        self._stirred = False

    @property
    def used(self) -> int | None:
        """Bytes of embeddings that are kept; None for a model without vision."""
        return self._store.used if self._sees else None

    def admit(self, entry: RequestState, is_open: IsOpen, share: float) -> Refusal | None:
        """Pin the embeddings of a request's images; a refusal if they do not fit, else None.

        No client may have more than its `share` of them; see `within_share`.
        """
        if not entry.images:
            return None
        if not self._sees:
            return TEXT_ONLY
        wanted = {one.work.key: self._token_bytes(one.work.layout) for one in entry.images}
        if (refusal := self._too_large(entry, wanted)) is not None:
            return refusal
        self._let_go(is_open)
        allowed = self._within_share(entry, wanted, share)
        pinned = self._store.pin(wanted)
        if pinned is None:
            return Refusal(
                "queue_full",
                "the images of open requests leave no room for more: try again later",
                "image_cache_bytes",
                1,
            )
        if not allowed:
            self._store.release(pinned)
            return Refusal(
                "too_many_requests",
                "with this request the embeddings of this client's images would be more than its "
                "share: wait for a request to end",
                "client_queue_share",
            )
        self._pinning.append(entry)
        entry.pinned = pinned
        entry.missing = {one.key for one in pinned if one.state is not SlotState.READY}
        self._stirred = True
        return None

    def look_again(self) -> None:
        """Have `act` look for requests that have come to wait since."""
        self._stirred = True

    def hear(self, message: ImageEvent) -> list[Sent]:
        """Record a message of encoder or executor; failures of the requests that it ends."""
        match message:
            case Patched(number, times):
                if (job := self._jobs.get(number)) is not None and job.at == "encoder":
                    job.at, job.times = "between", times
                    self._stirred = True
            case Encoded(number, times):
                self._finish(number, times)
            case EncodeFailed(number, code, text):
                return self._fail(number, code, text)
            case EncoderReady():
                failed = self._lose("encoder", "encoder_failed", "another one has taken over")
                self._come("encoder")
                return failed
            case EncoderLost(reason):
                return self._lose("encoder", "encoder_failed", reason)
        return []

    def executor_ready(self) -> None:
        """Record that a new executor can run the vision encoder; earlier executors have ended."""
        self._come("tower")

    def executor_lost(self, reason: str) -> list[Sent]:
        """Fail the work that the executor's vision encoder had."""
        return self._lose("tower", "executor_failed", reason)

    def take_lost(self) -> list[RequestState]:
        """Requests that failed with an encoder or executor that died, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def act(self, is_open: IsOpen) -> list[Sent]:
        """Queue requests whose embeddings are ready, and send work for others.

        Keys of requests that have ended are unpinned.
        """
        if not self._sees:
            return []
        self._let_go(is_open)
        sent = self._drop()
        if not self._stirred:
            return sent
        self._stirred = False
        for entry in [entry for entry in self._waiting if self._is_ready(entry)]:
            sent.append(self._take(entry))
            self._queue.push(entry)
        if self._present["tower"]:
            sent += self._towers()
        if self._present["encoder"]:
            sent += self._encodes()
        return sent

    def _let_go(self, is_open: IsOpen) -> None:
        for entry in [entry for entry in self._pinning if not is_open(entry.rid)]:
            self._pinning.remove(entry)
            self._store.release(entry.pinned)
            self._stirred = True

    def _drop(self) -> list[Sent]:
        """Stop the work that no request needs any more."""
        dropped = []
        for number, job in list(self._jobs.items()):
            if job.dropped or self._store.is_named(job.key):
                continue
            if job.at == "between":
                self._end(number)
                self._store.fail(job.key)
            elif job.at == "encoder":
                job.dropped = True
                dropped.append(number)
        return [DropWork(dropped)] if dropped else []

    def _within_share(self, entry: RequestState, wanted: dict[bytes, int], share: float) -> bool:
        """True if a client may have the `wanted` keys; a key of several requests counts once."""
        own, others = dict[bytes, int](), dict[bytes, int]()
        for one in self._pinning:
            theirs = own if one.client == entry.client else others
            theirs.update((pinned.key, pinned.slot.size) for pinned in one.pinned)
        had, taken = _bytes(own), _bytes(own | others | wanted)
        more = _bytes(own | wanted) - had
        limit = self._arenas.embeddings.size
        return not more or within_share(had, more, taken - more, limit, share)

    def _too_large(self, entry: RequestState, wanted: dict[bytes, int]) -> Refusal | None:
        for number, image in enumerate(entry.images):
            layout = image.work.layout
            if layout.tokens < 1 or layout.patches < 1:
                return Refusal("image_invalid", "an image has no size", f"images[{number}]")
            if slot_bytes(self._patch_bytes(layout)) > self._arenas.patches.size:
                text = f"an image has {layout.patches} patches, more than fit: send a smaller one"
                return Refusal("image_too_large", text, f"images[{number}]")
        if self._store.holds(wanted):
            return None
        return Refusal(
            "image_too_large",
            f"the images become {sum(wanted.values())} bytes of embeddings, "
            f"{self._arenas.embeddings.size} are there: send fewer or smaller ones",
            "image_cache_bytes",
        )

    def _is_ready(self, entry: RequestState) -> bool:
        return all(self._store.state(one.work.key) is SlotState.READY for one in entry.images)

    def _take(self, entry: RequestState) -> Embedded:
        """Remove a request whose embeddings are all ready."""
        self._waiting.remove(entry.rid)
        store, missing = self._store, entry.missing
        entry.embedded = [
            EmbeddedImage(store.slot(one.work.key), one.work.layout.tokens, one.spans, one.work.key)
            for one in entry.images
        ]
        return Embedded(
            entry.rid,
            tokens=sum(one.tokens for one in entry.embedded),
            cached=sum(one.work.key not in missing for one in entry.images),
            times=_total(store.times(key) for key in missing),
            sizes=[(one.work.layout.width, one.work.layout.height) for one in entry.images],
        )

    def _towers(self) -> list[Sent]:
        sent: list[Sent] = []
        for number, job in self._jobs.items():
            if job.at == "between":
                job.at = "tower"
                sent.append(
                    RunVisionEncoder(number, job.layout, job.patches, self._store.slot(job.key))
                )
        return sent

    def _encodes(self) -> list[Sent]:
        """New work, as much as fits, strictly in order."""
        sent: list[Sent] = []
        for entry, image in self._unsent():
            work = image.work
            if self._store.state(work.key) is not SlotState.EMPTY:
                continue
            alone = self._quarantine.runs_alone(entry)
            if self._jobs and (alone or self._alone):
                break
            room = len(self._jobs) < IN_FLIGHT
            patches = self._arenas.patches.take(self._patch_bytes(work.layout)) if room else None
            if patches is None:
                break
            self._alone = alone
            number = next(self._numbers)
            self._jobs[number] = _Job(work.key, entry.rid, work.layout, patches)
            sent.append(Encode(number, work, patches, self._store.begin(work.key)))
        return sent

    def _unsent(self) -> Iterable[tuple[RequestState, PromptImage]]:
        """Images by virtual arrival; each earlier request of a client lowers priority by one."""
        ahead = Counter[int]()
        ranked, arrival = [], self._waiting.virtual_arrival
        waiting = [(arrival(one.priority, one.queued), one.rid, one) for one in self._waiting]
        for arrived, rid, entry in sorted(waiting):
            ranked.append((arrival(-ahead[entry.client], arrived), rid, entry))
            ahead[entry.client] += 1
        return ((entry, image) for _, _, entry in sorted(ranked) for image in entry.images)

    def _finish(self, number: int, times: ImageTimes) -> None:
        job = self._end(number)
        if job is not None:
            self._store.finish(job.key, _total((job.times, times)))

    def _fail(self, number: int, code: str, text: str) -> list[Sent]:
        job = self._end(number)
        if job is None:
            return []
        self._store.fail(job.key)
        sender = self._waiting.get(job.sender)
        if sender is None:
            return []
        # The sender's bytes may be at fault: those of other requests may do.
        entries = [sender] if code == "internal" else list(self._waiting)
        return [failed for _, failed in self._refuse(entries, job.key, code, text)]

    def _end(self, number: int) -> _Job | None:
        """Remove a piece of work that has been answered."""
        job = self._jobs.pop(number, None)
        if job is not None:
            self._arenas.patches.free(job.patches)
            self._stirred = True
        return job

    def _refuse(
        self, entries: Iterable[RequestState], key: bytes, code: str, text: str
    ) -> list[tuple[RequestState, Failed]]:
        """Fail the requests among `entries` that wait for a key."""
        failed = []
        for entry in entries:
            keys = [one.work.key for one in entry.images]
            if key in keys:
                self._waiting.remove(entry.rid)
                field = f"images[{keys.index(key)}]"
                failed.append((entry, Failed([entry.rid], code, text, field)))
        return failed

    def _lose(self, where: Literal["encoder", "tower"], code: str, reason: str) -> list[Sent]:
        """Fail all work that was there; its slots may still be written to."""
        self._present[where] = False
        lost = {number: job for number, job in self._jobs.items() if job.at == where}
        who = "encoder" if where == "encoder" else "executor"
        text = f"the {who} was lost ({reason}): send the request again"
        failed: list[Sent] = []
        for number, job in lost.items():
            del self._jobs[number]
            self._abandoned[where].append(
                _AbandonedSlots(job.patches, self._store.abandon(job.key))
            )
            for entry, told in self._refuse(list(self._waiting), job.key, code, text):
                self._lost.append(entry)
                failed.append(told)
        self._stirred = True
        return failed

    def _come(self, where: Literal["encoder", "tower"]) -> None:
        for slots in self._abandoned[where]:
            self._arenas.patches.free(slots.patches)
            self._store.free(slots.target)
        self._abandoned[where] = []
        self._present[where] = self._stirred = True

    def _patch_bytes(self, layout: ImageLayout) -> int:
        return layout.patches * self._arenas.patch_bytes

    def _token_bytes(self, layout: ImageLayout) -> int:
        return layout.tokens * self._arenas.token_bytes


class _AbandonedSlots(NamedTuple):
    """Slots that a lost process may still write to."""

    patches: Slot
    target: Slot


def _bytes(sizes: dict[bytes, int]) -> int:
    return sum(map(slot_bytes, sizes.values()))


def _total(times: Iterable[ImageTimes]) -> ImageTimes:
    decode, resize, engine = 0.0, 0.0, 0.0
    for one in times:
        decode, resize = decode + one.decode_s, resize + one.resize_s
        engine += one.engine_s
    return ImageTimes(decode, resize, engine)
