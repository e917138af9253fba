"""Whether streams arrived as they were sent, token by token."""

from collections import Counter
from collections.abc import Sequence

import msgspec


class Tally(msgspec.Struct, kw_only=True):
    """What was checked: requests and tokens, and the faults among them.

    `lost` tokens never came (those of a failed request included), `doubled` ones came though
    nobody sent them (again), `disordered` ones came in another place. `failed` requests ended in
    an error, `misended` ones with another reason or count than asked for.
    """

    requests: int = 0
    tokens: int = 0
    lost: int = 0
    doubled: int = 0
    disordered: int = 0
    failed: int = 0
    misended: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing at all went wrong."""
        return not (self.lost or self.doubled or self.disordered or self.failed or self.misended)

    def check(self, expected: Sequence[int], received: Sequence[int]) -> None:
        """Compare one stream with the truth."""
        self.requests += 1
        self.tokens += len(received)
        if list(expected) == list(received):
            return
        sent, got = Counter(expected), Counter(received)
        self.lost += (sent - got).total()
        self.doubled += (got - sent).total()
        self.disordered += (sent & got).total() - _in_order(expected, received)

    def add(self, other: "Tally") -> None:
        """Count another tally in."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def _in_order(one: Sequence[int], other: Sequence[int]) -> int:
    # Length of the longest common subsequence, by dynamic programming over rows.
    row = [0] * (len(other) + 1)
    for left in one:
        diagonal = 0
        for index, right in enumerate(other, start=1):
            above = row[index]
            row[index] = diagonal + 1 if left == right else max(above, row[index - 1])
            diagonal = above
    return row[-1]
