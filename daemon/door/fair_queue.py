"""Fair queue of messages: the one whose sender has cost the least comes first; pure."""

from collections import deque
from collections.abc import Collection
from typing import Generic, TypeVar

_KEPT = 256
"""Most idle senders whose cost is remembered."""
K = TypeVar("K")
T = TypeVar("T")


class FairShares(Generic[K]):
    """Costs of each sender by start-time fair queuing; the next is the one that has cost the least.

    A sender that comes after a pause has cost as much as the one that was served last, or more: a
    pause earns nothing, and cancels no debt.
    """

    def __init__(self) -> None:
        self._costs: dict[K, float] = {}
        self._clock = 0.0

    def of(self, who: K) -> float:
        """Cost of one sender, in seconds of virtual time."""
        return self._costs.get(who, 0.0)

    def come(self, who: K, waiting: Collection[K] = ()) -> None:
        """Note that a sender has something waiting from now on; `waiting` are the others.

        A new sender has cost as much as the one of them that has cost the most: those that come
        anew each time would else always be before all others.
        """
        known = self._costs.get(who)
        if known is None:
            known = max(map(self.of, waiting), default=0.0)
        self._costs[who] = max(known, self._clock)

    def begin(self, who: K) -> None:
        """Note that a sender is served now."""
        self.come(who)
        self._clock = self._costs[who]

    def charge(self, who: K, seconds: float) -> None:
        """Add a cost to a sender."""
        self.come(who)
        self._costs[who] += seconds

    def forget(self, waiting: Collection[K]) -> None:
        """Drop the costs of idle senders where there are many, but for those that owe the most."""
        if len(self._costs) > _KEPT:
            most = sorted(self._costs, key=self._costs.__getitem__)[-_KEPT // 2 :]
            self._costs = {who: self._costs[who] for who in {*most, *waiting}}


class FairQueue(Generic[T]):
    """Messages that wait: peers share the time, and the connections of a peer its part.

    Those of one connection keep their order.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[int, deque[T]]] = {}
        self._peers = FairShares[str]()
        self._connections: dict[str, FairShares[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, peer: str, connection: int, message: T) -> None:
        """Add a message behind the others of its connection."""
        if peer not in self._waiting:
            self._waiting[peer] = {}
            self._peers.come(peer)
        connections = self._waiting[peer]
        if connection not in connections:
            self._connections.setdefault(peer, FairShares()).come(connection, connections)
            connections[connection] = deque()
        connections[connection].append(message)

    def take(self) -> T | None:
        """The next message; None where none waits."""
        if not self._waiting:
            return None
        peer = min(self._waiting, key=self._peers.of)
        connections, charges = self._waiting[peer], self._connections[peer]
        connection = min(connections, key=charges.of)
        self._peers.begin(peer)
        charges.begin(connection)
        message = connections[connection].popleft()
        if not connections[connection]:
            del connections[connection]
        if not connections:
            del self._waiting[peer]
        return message

    def charge(self, peer: str, connection: int, seconds: float) -> None:
        """Add the cost of a message to its connection."""
        self._peers.charge(peer, seconds)
        self._peers.forget(self._waiting)
        charges = self._connections.setdefault(peer, FairShares())
        charges.charge(connection, seconds)
        charges.forget(self._waiting.get(peer, ()))
        if len(self._connections) > _KEPT:
            self._connections = {one: self._connections[one] for one in self._waiting}
