from __future__ import annotations

from collections.abc import Iterable, Mapping
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


@dataclass(slots=True, eq=False)
class StoredEmbedding:
    """Embeddings of the image of a key, in a slot; `pins` counts the requests that name it."""

    key: bytes
    slot: Slot
    state: SlotState = SlotState.EMPTY
    times: ImageTimes = field(default_factory=ImageTimes)
    pins: int = 0

    @property
    def pinned(self) -> bool:
        """True if the slot must not be evicted."""
        return self.pins > 0 or self.state is SlotState.BUSY


class StoredEmbeddings:
    """Cache of embeddings by keys of their images, in the slots of one arena; no I/O.

    A key is pinned while a request that names it is open, and while its slot is being written. Of
    unpinned keys the least recently used is evicted first; a key that is not begun goes with its
    last request.
    """

    def __init__(self, slots: ArenaSlots) -> None:
        self._slots = slots
        # The least recently used first, of those that no request names.
        self._kept: dict[bytes, StoredEmbedding] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def used(self) -> int:
        """Bytes that are taken, pinned or not."""
        return self._slots.used

    def holds(self, wanted: Mapping[bytes, int]) -> bool:
        """True if keys of these sizes in bytes fit into an empty arena."""
        return _bytes(wanted.values()) <= self._slots.size

    def pin(self, wanted: Mapping[bytes, int]) -> list[StoredEmbedding] | None:
        """Pin keys of these sizes in bytes for a request; None, and no key, if they do not fit."""
        missing = {key: size for key, size in wanted.items() if key not in self._kept}
        stay = [one.slot.size for key, one in self._kept.items() if key in wanted or one.pinned]
        if _bytes(missing.values()) + _bytes(stay) > self._slots.size:
            return None
        found = {key: self._kept[key] for key in wanted if key not in missing}
        for one in found.values():
            one.pins += 1
        for key, size in missing.items():
            slot = self._take(size)
            if slot is None:
                self.release(found.values())
                return None
            found[key] = self._kept[key] = StoredEmbedding(key, slot, pins=1)
        return [found[key] for key in wanted]

    def release(self, pinned: Iterable[StoredEmbedding]) -> None:
        """Unpin the embeddings of a request that has ended; abandoned ones are ignored."""
        for one in pinned:
            one.pins -= 1
            if self._kept.get(one.key) is one:
                self._settle(one)

    def is_named(self, key: bytes) -> bool:
        """True if a request names the key."""
        kept = self._kept.get(key)
        return kept is not None and kept.pins > 0

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
        self._settle(kept)

    def fail(self, key: bytes) -> None:
        """Mark the slot of a key as not begun: its writer has failed and ended."""
        kept = self._kept[key]
        kept.state = SlotState.EMPTY
        self._settle(kept)

    def abandon(self, key: bytes) -> Slot:
        """Remove a key whose slot may still be written to; `free` frees that slot later."""
        return self._kept.pop(key).slot

    def free(self, slot: Slot) -> None:
        """Free an abandoned slot, to which nothing writes any more."""
        self._slots.free(slot)

    def _settle(self, kept: StoredEmbedding) -> None:
        """Free the slot of a key that is not pinned, or keep it as the most recently used."""
        if kept.pinned:
            return
        del self._kept[kept.key]
        if kept.state is SlotState.READY:
            self._kept[kept.key] = kept
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
