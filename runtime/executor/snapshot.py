from collections.abc import Iterable

from runtime.executor.engine import Binding

AddressAndShape = tuple[int, tuple[int, ...]]


class BindingSnapshot:
    """Addresses and shapes of all bindings of a step; `key` is a hash of all of these.

    Equality compares every address and size, never the key alone.
    """

    __slots__ = ("addresses", "bindings", "key")

    def __init__(self, bindings: tuple[AddressAndShape, ...], key: int | None = None) -> None:
        self.bindings = bindings
        self.addresses = tuple(address for address, _ in bindings)
        self.key = hash(bindings) if key is None else key

    @classmethod
    def of(cls, bindings: Iterable[Binding]) -> "BindingSnapshot":
        """The snapshot of a step's bindings, in their order."""
        return cls(tuple((one.tensor.address, one.shape) for one in bindings))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BindingSnapshot) and self.bindings == other.bindings

    def __hash__(self) -> int:
        return self.key
