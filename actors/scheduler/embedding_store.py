from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hearth.actors.arena import ArenaSlots, slot_bytes
from hearth.actors.messages import ImageTimes
from hearth.runtime.images import Slot


class SlotState(Enum):
    """States of a slot for embeddings: not begun, being written, ready to read."""

    EMPTY = "empty"
    BUSY = "busy"
    READY = "ready"


@dataclass(slots=True)
class _Kept:
    slot: Slot
    state: SlotState = SlotState.EMPTY
    times: ImageTimes = field(default_factory=ImageTimes)
    requests: set[int] = field(default_factory=set)

    @property
    def pinned(self) -> bool:
        """True if the slot must not be evicted."""
        return bool(self.requests) or self.state is SlotState.BUSY


class StoredEmbeddings:
    """Cache of embeddings by keys of their images, in the slots of one arena; no I/O.

    A key is pinned while a request that names it is open, and while its slot is being written. Of
    the others the least recently used is evicted first; one that is not begun goes with its last
    request.
    """

    def __init__(self, slots: ArenaSlots) -> None:
        self._slots = slots
        # The least recently used first, of those that no request names.
        self._kept: dict[bytes, _Kept] = {}
        # By request: its client, and the bytes of its keys.
        self._pins: dict[int, tuple[int, Mapping[bytes, int]]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def requests(self) -> list[int]:
        """Numbers of the requests that have pinned keys."""
        return list(self._pins)

    @property
    def pins(self) -> Collection[tuple[int, Mapping[bytes, int]]]:
        """By request that has pinned keys: its client, and bytes by key."""
        return self._pins.values()

    @property
    def used(self) -> int:
        """Bytes that are taken, pinned or not."""
        return self._slots.used

    def holds(self, wanted: Mapping[bytes, int]) -> bool:
        """True if keys of so many bytes each fit into an empty arena."""
        return _bytes(wanted.values()) <= self._slots.size

    def pin(self, rid: int, client: int, wanted: Mapping[bytes, int]) -> bool:
        """Pin keys of so many bytes each for a request; False, and none, if they do not fit."""
        missing = {key: size for key, size in wanted.items() if key not in self._kept}
        stay = [one.slot.size for key, one in self._kept.items() if key in wanted or one.pinned]
        if _bytes(missing.values()) + _bytes(stay) > self._slots.size:
            return False
        for key in wanted.keys() - missing.keys():
            self._kept[key].requests.add(rid)
        taken = {key: self._take(size) for key, size in missing.items()}
        for key, slot in taken.items():
            if slot is not None:
                self._kept[key] = _Kept(slot, requests={rid})
        self._pins[rid] = client, wanted
        if None in taken.values():
            self.release(rid)
            return False
        return True

    def release(self, rid: int) -> None:
        """Unpin the keys of a request that has ended; unknown ones are ignored."""
        _, keys = self._pins.pop(rid, (0, ()))
        for key in keys:
            kept = self._kept.get(key)
            if kept is not None:
                kept.requests.discard(rid)
                self._settle(key, kept)

    def is_named(self, key: bytes) -> bool:
        """True if a request names the key."""
        kept = self._kept.get(key)
        return kept is not None and bool(kept.requests)

    def state(self, key: bytes) -> SlotState:
        """State of the slot of a key that is here."""
        return self._kept[key].state

    def slot(self, key: bytes) -> Slot:
        """Slot of the embeddings of a key."""
        return self._kept[key].slot

    def times(self, key: bytes) -> ImageTimes:
        """Seconds that it took to make the embeddings of a key."""
        return self._kept[key].times

    def begin(self, key: bytes) -> Slot:
        """Mark the slot of a key as being written; the slot."""
        kept = self._kept[key]
        kept.state = SlotState.BUSY
        return kept.slot

    def finish(self, key: bytes, times: ImageTimes) -> None:
        """Mark the slot of a key as ready."""
        kept = self._kept[key]
        kept.state, kept.times = SlotState.READY, times
        self._settle(key, kept)

    def fail(self, key: bytes) -> None:
        """Mark the slot of a key as not begun: its writer has failed and ended."""
        kept = self._kept[key]
        kept.state = SlotState.EMPTY
        self._settle(key, kept)

    def abandon(self, key: bytes) -> Slot:
        """Remove a key whose slot may still be written to; `free` frees that slot later."""
        return self._kept.pop(key).slot

    def free(self, slot: Slot) -> None:
        """Free an abandoned slot, to which nothing writes any more."""
        self._slots.free(slot)

    def _settle(self, key: bytes, kept: _Kept) -> None:
        """Free the slot of a key that is not pinned, or keep it as the most recently used."""
        if kept.pinned:
            return
        del self._kept[key]
        if kept.state is SlotState.READY:
            self._kept[key] = kept
        else:
            self._slots.free(kept.slot)

    def _take(self, size: int) -> Slot | None:
        for key in [key for key, kept in self._kept.items() if not kept.pinned]:
            if (slot := self._slots.take(size)) is not None:
                return slot
            self._slots.free(self._kept.pop(key).slot)
        return self._slots.take(size)


def _bytes(sizes: Iterable[int]) -> int:
    return sum(map(slot_bytes, sizes))
