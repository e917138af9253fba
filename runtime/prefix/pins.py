"""Which pages clients keep in the prefix cache; pure."""

from collections import Counter
from collections.abc import Sequence

from runtime.errors import HearthError

PINS_FULL = ("cache_full", "prefix_cache_bytes")
"""Code and field of the error where all clients together keep as much as they may."""


class Pins:
    """Names of pages by client, whether the pages are there yet or not.

    A client keeps at most a quarter of the pages that there is room for, and all of them together
    at most three quarters, so that there is always room to come and go.
    """

    def __init__(self, room: int) -> None:
        self._each = room // 4
        self._all = 3 * room // 4
        # A dict for its order: a page's name comes behind that of the page before it.
        self._by_client: dict[int, dict[bytes, None]] = {}
        self._clients: Counter[bytes] = Counter()

    def __contains__(self, name: bytes) -> bool:
        return name in self._clients

    def __len__(self) -> int:
        """How many pages are kept, by whomever."""
        return len(self._clients)

    def pin(self, client: int, names: Sequence[bytes]) -> list[bytes]:
        """Keep these for the client; those of them that nobody kept before, in their order.

        Raises `cache_full` with the field `cache` where that is more than it may keep, and
        `PINS_FULL` where it is more than all may.
        """
        own = self._by_client.get(client, {})
        new = [name for name in names if name not in own]
        first = [name for name in new if name not in self._clients]
        if len(own) + len(new) > self._each:
            raise HearthError(
                "cache_full",
                f"to pin this prompt takes {len(new)} pages of the prefix cache, and this client"
                f" has {self._each - len(own)} left of the {self._each} that it may pin",
                "cache",
            )
        if len(self._clients) + len(first) > self._all:
            raise HearthError(
                "cache_full",
                f"to pin this prompt takes {len(first)} pages of the prefix cache, and of the"
                f" {self._all} that all clients may pin {self._all - len(self._clients)} are left",
                PINS_FULL[1],
            )
        if new:
            self._by_client.setdefault(client, {}).update(dict.fromkeys(new))
            self._clients.update(new)
        return first

    def unpin(self, client: int) -> list[bytes]:
        """Keep nothing for it any more; what nobody else keeps, each before the page before it."""
        gone = []
        for name in reversed(self._by_client.pop(client, {})):
            self._clients[name] -= 1
            if not self._clients[name]:
                del self._clients[name]
                gone.append(name)
        return gone
