from collections.abc import Iterable, Sequence

from runtime.caches.hybrid_cache_manager import HybridCacheManager
from runtime.device.arrays import PageCopy
from runtime.device.device import Device
from runtime.prefix.identities import PAGE_TOKENS
from runtime.prefix.page_index import Rooms
from runtime.prefix.pages import MemoryTier, Page, Place, Save
from runtime.tensors.tensor import Tensor


class PagePool:
    """The memory of the prefix cache, at addresses that stay: slots of one page each.

    `caches` are those of the base and, where there is one, of the draft. A page holds a token at
    its place among the page's; the draft's entry of a token, which lies one slot before the token
    in the draft's cache, lies with it. All copies are queued on the device's stream, so what reads
    a slot is done before another page is written there.
    """

    def __init__(self, device: Device, caches: Sequence[HybridCacheManager], rooms: Rooms) -> None:
        self._device = device
        self._caches = tuple(caches)
        self._tensors: dict[MemoryTier, list[Tensor]] = {"device": [], "host": []}
        for number, one in enumerate(self._caches):
            first = one.kv.keys[0]
            buffers = len(one.kv.keys) + len(one.kv.values)
            shape = (buffers, first.shape[1], PAGE_TOKENS, first.shape[3])
            name = f"prefix_pages_{number}"
            self._tensors["device"].append(device.zeros(name, (rooms.device, *shape), first.dtype))
            if rooms.host:
                self._tensors["host"].append(
                    device.host_zeros(f"{name}_host", (rooms.host, *shape), first.dtype)
                )

    @property
    def page_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(one.nbytes // one.shape[0] for one in self._tensors["device"])

    @property
    def has_draft(self) -> bool:
        """Whether pages have room for a draft's state."""
        return len(self._caches) > 1

    def save(self, saves: Iterable[Save], row: int) -> None:
        """Copy what the slots of a row hold into pages of the device's memory."""
        base, draft = list[PageCopy](), list[PageCopy]()
        for page, place, first, whole, drafted in saves:
            if whole:
                base.append(PageCopy(place.slot, 0, row, first, page.length))
            if drafted:
                draft.append(_draft_copy(place.slot, row, first, first + page.length))
        for number, copies in enumerate((base, draft)):
            if copies:
                self._caches[number].kv.save(self._tensors["device"][number], copies)

    def load(self, pages: Sequence[Page], row: int, filled: int, drafted: int) -> None:
        """Copy pages that lie in memory into the first slots of a row.

        `filled` are those of the base, `drafted` those of the draft.
        """
        for tier, tensors in self._tensors.items():
            base, draft = list[PageCopy](), list[PageCopy]()
            for first, page in zip(range(0, filled + 1, PAGE_TOKENS), pages, strict=False):
                if page.place is None or page.place.tier != tier:
                    continue
                slot, end = page.place.slot, first + page.length
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
        found = []
        for tensor in self._tensors[place.tier]:
            _, *shape = tensor.shape
            size = tensor.nbytes // tensor.dtype.itemsize // tensor.shape[0]
            found.append(tensor.part(tensor.name, place.slot * size, tuple(shape)))
        return found


def _draft_copy(slot: int, row: int, first: int, end: int) -> PageCopy:
    """The entries of tokens `first` to `end` - 1; the first token of a row has none."""
    begin = max(first, 1)
    return PageCopy(slot, begin - first, row, begin - 1, max(0, end - begin))
