"""An executor with fixed step times, as the scheduler's policy sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from actors.messages import (
    Cancel,
    Continuation,
    FromExecutor,
    Offer,
    Offered,
    Release,
    Revoke,
    RowsEnded,
    RowsPlaced,
    RowsReturned,
    Step,
)
from runtime.request import RowToken

Control = Cancel | Revoke | Release


@dataclass
class SimulatedRow:
    """A row with a place; its prefill is done within its first step."""

    rid: int
    target: int
    generated: list[int]
    prefill_s: float
    decode_s: float = 0.0
    released: bool = False

    @property
    def has_paid(self) -> bool:
        return self.decode_s >= self.prefill_s


class SimulatedExecutor:
    """Reads its mail and lets rows leave and join at each border; `tell` takes what it says."""

    def __init__(
        self,
        *,
        incarnation: int,
        places: int,
        step_s: float,
        prefill_s: float,
        tell: Callable[[FromExecutor], None],
    ) -> None:
        self.incarnation, self.places = incarnation, places
        self._step_s, self._prefill_s = step_s, prefill_s
        self._tell = tell
        self.mail: list[Offer | Control] = []
        self.offered: list[Offered] = []
        self.rows: dict[int, SimulatedRow] = {}
        # The requests of each step, oldest first.
        self.steps: list[list[int]] = []

    def border(self) -> float | None:
        """Read mail and place rows; how long the step takes that begins now, if one does."""
        mail, self.mail = self.mail, []
        for message in mail:
            self._read(message)
        for row in [row for row in self.rows.values() if row.released and row.has_paid]:
            del self.rows[row.rid]
            told = Continuation(row.rid, row.generated)
            self._tell(RowsReturned(self.incarnation, [told]))
        joining = self._place()
        if not self.rows:
            return None
        self.steps.append(list(self.rows))
        return self._step_s + joining

    def step(self, ended: float) -> None:
        """The step that began at the last border has ended: each row has a token more."""
        rids, tokens = [], []
        for row in list(self.rows.values()):
            row.generated.append(1)
            row.decode_s += self._step_s
            ends = len(row.generated) == row.target
            rids.append(row.rid)
            tokens.append(RowToken(0, 1, finish="length" if ends else None))
            if ends:
                del self.rows[row.rid]
        self._tell(Step(self.incarnation, rids, tokens, ended))

    def _place(self) -> float:
        """Give free places to the offered rows that are next; how long their prefill takes."""
        joining = self.offered[: self.places - len(self.rows)]
        self.offered = self.offered[len(joining) :]
        seconds = 0.0
        for one in joining:
            cost = self._prefill_s * len(one.row.token_ids)
            generated = one.row.token_ids[one.row.prompt_length :]
            target = one.row.options.max_tokens or 0
            self.rows[one.rid] = SimulatedRow(one.rid, target, generated, cost)
            seconds += cost
        if joining:
            self._tell(RowsPlaced(self.incarnation, [one.rid for one in joining]))
        return seconds

    def _read(self, message: Offer | Control) -> None:
        match message:
            case Offer(rows):
                self.offered = sorted([*self.offered, *rows], key=lambda one: one.order)
            case Release(rids):
                for row in self._of(rids):
                    row.released = True
            case Revoke(rids):
                if left := self._withdraw(rids):
                    self._tell(RowsReturned(self.incarnation, unplaced=left))
            case Cancel(rid):
                placed = self.rows.pop(rid, None) is not None
                if placed or self._withdraw([rid]):
                    self._tell(RowsEnded(self.incarnation, [rid]))

    def _of(self, rids: list[int]) -> Iterator[SimulatedRow]:
        return (self.rows[rid] for rid in rids if rid in self.rows)

    def _withdraw(self, rids: list[int]) -> list[int]:
        left = [one.rid for one in self.offered if one.rid in rids]
        self.offered = [one for one in self.offered if one.rid not in rids]
        return left
