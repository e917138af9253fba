from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hearth.actors.executor.rows import ExecutorRows
from hearth.actors.messages import ExecutorMessage, Schedule, StepOutput
from hearth.runtime.request import RowToken


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

    @property
    def has_paid(self) -> bool:
        return not self.left_s and self.decode_s >= self.prefill_s


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
        tell: Callable[[StepOutput], None],
        chunk_s: float | None = None,
    ) -> None:
        self.incarnation, self.places = incarnation, places
        self._step_s, self._prefill_s = step_s, prefill_s
        self._tell, self._chunk_s = tell, chunk_s
        self._prefills = False
        # What the step that goes on takes off the rest of a row's prefill.
        self._reading: dict[int, float] = {}
        self.mail: list[ExecutorMessage] = []
        self.state = ExecutorRows(incarnation)
        self.rows: dict[int, SimulatedRow] = {}
        # The requests of each step, oldest first.
        self.steps: list[list[int]] = []
        # The adapter of each batch.
        self.adapters: list[str] = []

    def border(self) -> float | None:
        """Read mail and place rows; how long the step takes that begins now, if one does."""
        mail, self.mail = self.mail, []
        for message in mail:
            if isinstance(message, Schedule):
                for rid in self.state.update(message):
                    del self.rows[rid]
        urgent = self.state.preempted
        for row in [row for row in self.rows.values() if row.rid in urgent]:
            if urgent[row.rid] or row.has_paid:
                self.state.preempt(row.rid, self.rows.pop(row.rid).generated)
        self._place()
        self._say()
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
        tokens, placed = [], {}
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
            tokens.append(RowToken(row.rid, 1, finish="length" if ends else None))
            if ends:
                del self.rows[row.rid]
        if tokens:
            self.state.record_tokens(tokens, ended, placed)
        self._say()

    def _say(self) -> None:
        output = self.state.take_output()
        if output is not None:
            self._tell(output)

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
        """Give free places to the rows that are next, of those of the adapter in use."""
        waiting = self.state.waiting
        if not self.rows and waiting:
            self.adapters.append(next(iter(waiting.values())).options.adapter)
        fitting = [rid for rid, row in waiting.items() if row.options.adapter == self.adapters[-1]]
        joining = fitting[: self.places - len(self.rows)]
        for rid in joining:
            row = waiting[rid]
            cost = self._prefill_s * len(row.token_ids)
            generated = row.token_ids[row.prompt_length :]
            target = row.options.max_tokens or 0
            adapter = row.options.adapter
            self.rows[rid] = SimulatedRow(rid, target, adapter, generated, cost, cost)
        assert len({row.adapter for row in self.rows.values()}) <= 1, "one step has one adapter"
        if joining:
            self.state.place(joining)


def _rest(row: SimulatedRow) -> float:
    return row.left_s
