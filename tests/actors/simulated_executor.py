"""An executor with fixed step times, as the scheduler's policy sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hearth.actors.actor_message import FromExecutor
from hearth.actors.executor_messages import Offer, Offered, Release, Revoke
from hearth.actors.messages import Cancel, Continuation, RowsEnded, RowsPlaced, RowsReturned, Step
from hearth.runtime.request import RowToken

Control = Cancel | Revoke | Release


@dataclass
class SimulatedRow:
    """A row with a place; `left_s` of its prefill are to be done."""

    rid: int
    target: int
    adapter: str
    generated: list[int]
    prefill_s: float
    left_s: float
    placed: float = 0.0
    begun: bool = False
    decode_s: float = 0.0
    released: bool = False
    urgent: bool = False

    @property
    def has_paid(self) -> bool:
        return self.urgent or (not self.left_s and self.decode_s >= self.prefill_s)


class SimulatedExecutor:
    """Reads its mail and lets rows leave and join at each border; `tell` takes what it says.

    Prompts are read within a row's first step; or with `chunk_s` in pieces of so many seconds, the
    shortest rest first, in turns with the steps of those that decode.
    """

    def __init__(
        self,
        *,
        incarnation: int,
        places: int,
        step_s: float,
        prefill_s: float,
        tell: Callable[[FromExecutor], None],
        chunk_s: float | None = None,
    ) -> None:
        self.incarnation, self.places = incarnation, places
        self._step_s, self._prefill_s = step_s, prefill_s
        self._tell, self._chunk_s = tell, chunk_s
        self._prefills = False
        # What the step that goes on takes off the rest of a row's prefill.
        self._reading: dict[int, float] = {}
        self.mail: list[Offer | Control] = []
        self.offered: list[Offered] = []
        self.rows: dict[int, SimulatedRow] = {}
        # The requests of each step, oldest first.
        self.steps: list[list[int]] = []
        # The adapter of each batch.
        self.adapters: list[str] = []

    def border(self) -> float | None:
        """Read mail and place rows; how long the step takes that begins now, if one does."""
        mail, self.mail = self.mail, []
        for message in mail:
            self._read(message)
        for row in [row for row in self.rows.values() if row.released and row.has_paid]:
            del self.rows[row.rid]
            told = Continuation(row.rid, row.generated)
            self._tell(RowsReturned(self.incarnation, [told]))
        self._place()
        if not self.rows:
            return None
        self._reading = self._choose()
        going = [
            row.rid for row in self.rows.values() if not row.left_s or row.rid in self._reading
        ]
        self.steps.append(going)
        seconds = sum(self._reading.values())
        return seconds if self._prefills else self._step_s + seconds

    def step(self, ended: float) -> None:
        """The step that began at the last border has ended: each row of it has a token more."""
        rids, tokens, placed = [], [], {}
        for row in list(self.rows.values()):
            if row.left_s or self._prefills:
                row.left_s -= self._reading.get(row.rid, 0.0)
                if row.left_s > 1e-9 or row.rid not in self._reading:
                    continue
                row.left_s = 0.0
            if not self._prefills:
                row.decode_s += self._step_s
            if not row.begun:
                row.begun, placed[row.rid] = True, row.placed
            row.generated.append(1)
            ends = len(row.generated) == row.target
            rids.append(row.rid)
            tokens.append(RowToken(0, 1, finish="length" if ends else None))
            if ends:
                del self.rows[row.rid]
        if rids:
            self._tell(Step(self.incarnation, rids, tokens, ended, placed))

    def _choose(self) -> dict[int, float]:
        """Of which rows how much prefill is done in the next step."""
        joiners = sorted((row for row in self.rows.values() if row.left_s), key=_rest)
        if self._chunk_s is None:
            return {row.rid: row.left_s for row in joiners}
        decoders = len(self.rows) - len(joiners)
        self._prefills = bool(joiners) and not (self._prefills and decoders)
        if not self._prefills:
            return {}
        return {joiners[0].rid: min(joiners[0].left_s, self._chunk_s)}

    def _place(self) -> None:
        """Give free places to the offered rows that are next, of those of the adapter in use."""
        if not self.rows and self.offered:
            self.adapters.append(self.offered[0].row.options.adapter)
        fitting = [one for one in self.offered if one.row.options.adapter == self.adapters[-1]]
        joining = fitting[: self.places - len(self.rows)]
        self.offered = [one for one in self.offered if one not in joining]
        for one in joining:
            cost = self._prefill_s * len(one.row.token_ids)
            generated = one.row.token_ids[one.row.prompt_length :]
            target = one.row.options.max_tokens or 0
            adapter = one.row.options.adapter
            self.rows[one.rid] = SimulatedRow(one.rid, target, adapter, generated, cost, cost)
        assert len({row.adapter for row in self.rows.values()}) <= 1, "one step has one adapter"
        if joining:
            self._tell(RowsPlaced(self.incarnation, [one.rid for one in joining]))

    def _read(self, message: Offer | Control) -> None:
        match message:
            case Offer(rows):
                self.offered = sorted([*self.offered, *rows], key=lambda one: one.order)
            case Release(rids, at_once):
                for row in self._of(rids):
                    row.released = True
                    row.urgent = at_once
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


def _rest(row: SimulatedRow) -> float:
    return row.left_s
