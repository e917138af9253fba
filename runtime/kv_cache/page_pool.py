from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Device, Span
from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from hearth.runtime.kv_cache.pages import (
    PAGE_TOKENS,
    MemoryTier,
    Page,
    Place,
    Save,
    Tier,
    TierCapacity,
)
from hearth.runtime.memory.sizes import kv_cache_bytes
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.reference.ops import PageCopy
from hearth.runtime.tensors.tensor import Tensor

ARRIVING = 1
"""Number of device pages through which pages read from disk are copied."""
STAGED = 8
"""Number of host pages in which pages wait that go to disk."""
_RECORD_BYTES = 1280
"""Bytes of host memory for the record of a page: tokens, names and places."""
_FIELDS = ("prefix_cache_bytes", "prefix_host_bytes", "prefix_disk_bytes")


def page_bytes(base: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig | None) -> int:
    """Bytes of a page: keys and values of its tokens, and the entries of a draft."""
    engines = [base] if draft is None else [base, draft]
    return sum(kv_cache_bytes(one, 1, PAGE_TOKENS) for one in engines)


def record_bytes(tiers: TierCapacity) -> int:
    """Bytes of host memory for the records of all pages, beside their contents."""
    return _RECORD_BYTES * sum(tiers) if tiers.device else 0


def prefix_capacity(
    base: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig | None, options: RuntimeOptions
) -> TierCapacity:
    """Number of pages that fit into each tier by the options; 0 bytes is no cache.

    Raises `invalid_value` or `unsupported_option` naming the option that cannot be met.
    """
    in_memory, counts = page_bytes(base, draft), list[int]()
    for name in _FIELDS:
        size = in_memory + HEAD_BYTES if name == "prefix_disk_bytes" else in_memory
        nbytes = getattr(options, name)
        if nbytes < 0:
            raise HearthError("invalid_value", f"{name} must not be negative", name)
        if 0 < nbytes < size:
            what = f"{name} is {nbytes}, a page of this model takes {size} bytes: take more, or 0"
            raise HearthError("invalid_value", what, name)
        if nbytes and not options.prefix_cache_bytes:
            what = f"{name} is for what leaves the prefix cache, which prefix_cache_bytes makes"
            raise HearthError("unsupported_option", what, name)
        counts.append(nbytes // size)
    if options.prefix_host_bytes and base.device == "cpu":
        what = "prefix_host_bytes is for a GPU: on a CPU prefix_cache_bytes are host memory"
        raise HearthError("unsupported_option", what, "prefix_host_bytes")
    if options.prefix_disk_bytes and not options.prefix_folder:
        what = "pages on disk want a folder of their own, prefix_folder"
        raise HearthError("invalid_value", what, "prefix_folder")
    return TierCapacity(*counts)


class Loaded(NamedTuple):
    """Number of tokens loaded from a tier, and the span of the copy on the device."""

    tier: Tier
    tokens: int
    span: Span


class PagePool:
    """The memory of the prefix cache, at addresses that stay: slots of one page each.

    `caches` are the base's and, if there is a draft, the draft's. Token i of a page lies at index i
    of its slot, and so does the draft's entry of the token, which lies one cache slot before the
    token in the draft's cache. All copies are queued on the device's stream, so a read of a slot
    ends before another page is written there.
    """

    def __init__(
        self, device: Device, caches: Sequence[HybridCacheManager], tiers: TierCapacity
    ) -> None:
        self._device = device
        self._caches = tuple(caches)
        self._tensors: dict[MemoryTier, list[Tensor]] = {"device": [], "host": []}
        self._arriving: list[Tensor] = []
        self._leaving: list[Tensor] = []
        for number, one in enumerate(self._caches):
            first = one.kv.keys[0]
            buffers = len(one.kv.keys) + len(one.kv.values)
            shape = (buffers, first.shape[1], PAGE_TOKENS, first.shape[3])
            name = f"prefix_pages_{number}"
            self._tensors["device"].append(device.zeros(name, (tiers.device, *shape), first.dtype))
            if tiers.host:
                self._tensors["host"].append(
                    device.host_zeros(f"{name}_host", (tiers.host, *shape), first.dtype)
                )
            if tiers.disk:
                arriving = device.zeros(f"{name}_arriving", (ARRIVING, *shape), first.dtype)
                self._arriving.append(arriving)
                leaving = device.host_zeros(f"{name}_leaving", (STAGED, *shape), first.dtype)
                self._leaving.append(leaving)

    @property
    def page_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(one.nbytes // one.shape[0] for one in self._tensors["device"])

    @property
    def has_draft(self) -> bool:
        """True if pages hold a draft's state as well."""
        return len(self._caches) > 1

    def save(self, saves: Iterable[Save], row: int) -> None:
        """Copy slots of a row into pages of device memory."""
        base, draft = list[PageCopy](), list[PageCopy]()
        for page, place, first, whole, drafted in saves:
            if whole:
                base.append(PageCopy(place.slot, 0, row, first, page.length))
            if drafted:
                draft.append(_draft_copy(place.slot, row, first, first + page.length))
        for number, copies in enumerate((base, draft)):
            if copies:
                self._caches[number].kv.save(self._tensors["device"][number], copies)

    def load(
        self,
        pages: Sequence[Page],
        row: int,
        filled: int,
        drafted: int,
        data: Mapping[Page, bytes] = MappingProxyType({}),
    ) -> list[Loaded]:
        """Copy pages into the first cache slots of a row; returns a span for each tier.

        `filled` slots are those of the base, `drafted` slots those of the draft. `data` has the
        bytes of pages that lie on disk only.
        """
        spans = []
        for tier, tensors in self._tensors.items():
            own = [
                (first, page, page.place.slot)
                for first, page in zip(range(0, filled + 1, PAGE_TOKENS), pages, strict=False)
                if page.place is not None and page.place.tier == tier
            ]
            if own:
                span = self._device.span()
                self._load(tensors, own, row, filled, drafted)
                span.end()
                spans.append(Loaded(tier, _tokens(own, filled), span))
        read = [
            (first, page, 0)
            for first, page in zip(range(0, filled + 1, PAGE_TOKENS), pages, strict=False)
            if page in data
        ]
        if read:
            span = self._device.span()
            for one in read:
                self._receive(data[one[1]])
                self._load(self._arriving, [one], row, filled, drafted)
            span.end()
            spans.append(Loaded("disk", _tokens(read, filled), span))
        return spans

    def stage(self, place: Place, number: int) -> Span:
        """Queue a copy of a slot to host page `number`, below `STAGED`, to wait for the disk."""
        span = self._device.span()
        for one, other in zip(self._slot(place), _parts(self._leaving, number), strict=True):
            self._device.transfer(one, other)
        span.end()
        return span

    def staged(self, number: int) -> bytes:
        """The bytes of a page that `stage` has copied, once its span has ended."""
        return b"".join(part.array.tobytes() for part in _parts(self._leaving, number))

    def _receive(self, data: bytes) -> None:
        begin = 0
        for part in _parts(self._arriving, 0):
            array = np.frombuffer(data, part.dtype, part.nbytes // part.dtype.itemsize, begin)
            self._device.put(part, array.reshape(part.shape))
            begin += part.nbytes

    def _load(
        self,
        tensors: Sequence[Tensor],
        pages: Iterable[tuple[int, Page, int]],
        row: int,
        filled: int,
        drafted: int,
    ) -> None:
        """Copy pages, each with its first token and its slot, into the slots of a row."""
        base, draft = list[PageCopy](), list[PageCopy]()
        for first, page, slot in pages:
            end = first + page.length
            if first < filled:
                base.append(PageCopy(slot, 0, row, first, min(end, filled) - first))
            if first <= drafted:
                draft.append(_draft_copy(slot, row, first, min(end, drafted + 1)))
        for number, copies in enumerate((base, draft)):
            if copies and number < len(tensors):
                self._caches[number].kv.load(tensors[number], copies)

    def move(self, source: Place, target: Place) -> None:
        """Copy a slot, of base and draft, from one tier to another."""
        for one, other in zip(self._slot(source), self._slot(target), strict=True):
            self._device.transfer(one, other)

    def _slot(self, place: Place) -> list[Tensor]:
        return _parts(self._tensors[place.tier], place.slot)


def _parts(tensors: Iterable[Tensor], slot: int) -> list[Tensor]:
    """The part of each tensor that is this slot, with the shape of a page."""
    found = []
    for tensor in tensors:
        _, *shape = tensor.shape
        found.append(tensor.part(tensor.name, slot * prod(shape), tuple(shape)))
    return found


def _tokens(pages: Iterable[tuple[int, Page, int]], filled: int) -> int:
    """Number of the first `filled` tokens of a row that these pages hold."""
    return sum(max(1, min(first + page.length, filled) - first) for first, page, _ in pages)


def _draft_copy(slot: int, row: int, first: int, end: int) -> PageCopy:
    """The entries of tokens `first` to `end` - 1; the first token of a row has none."""
    begin = max(first, 1)
    return PageCopy(slot, begin - first, row, begin - 1, max(0, end - begin))
