import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.request import RowRequest, RowToken

Kept = TypeVar("Kept")


class RowMove(NamedTuple):
    """Row `source` becomes row `target`; its first `used` slots are kept."""

    source: int
    target: int
    used: int


class DirtySlots(NamedTuple):
    """Slots [begin, end) of a place that may hold numbers that are not finite."""

    place: int
    begin: int
    end: int


class BatchReorder(NamedTuple):
    """New places of the rows of a batch between two steps.

    The places 0 to `rows` - 1 are taken from then on. Moves happen in their order: each target is
    free by its turn, rows go up or down, and a row moves once. `RowMove.used` counts slots of
    the base's cache; an owner with lengths of its own uses those. New rows have their place in
    `assignments`: their first `filled` tokens, and `drafted` entries of a draft engine, come from
    the prefix cache. Dirty slots are zeroed when all rows have moved.
    """

    rows: int
    moves: Sequence[RowMove] = ()
    assignments: Sequence[tuple[int, "DecodingRow"]] = ()
    stale: Sequence[DirtySlots] = ()

    @classmethod
    def fresh(cls, requests: Sequence[RowRequest]) -> "BatchReorder":
        """Return a reorder of an empty batch, in which `requests` take the places 0, 1, ...

        Their rows are full: they get no tokens.
        """
        rows = [
            DecodingRow(place, request, len(request.token_ids), frozenset())
            for place, request in enumerate(requests)
        ]
        return cls(len(rows), assignments=list(enumerate(rows)))

    def settle(self, kept: Sequence[Kept], assign: Callable[["DecodingRow"], Kept]) -> list[Kept]:
        """Apply the reorder to a list by place, with `assign` for new rows.

        Raises `internal` where a row would be lost on its way, or a place have none or two.
        """
        places, settled = dict(enumerate(kept)), set[int]()
        for source, target, _ in self.moves:
            if target in settled or source in settled or source not in places:
                raise HearthError("internal", f"rows cannot move so: {list(self.moves)}")
            places[target] = places.pop(source)
            settled.add(target)
        for place, row in self.assignments:
            if place in settled:
                raise HearthError("internal", f"place {place} is given to two rows")
            places[place] = assign(row)
            settled.add(place)
        if not settled.issubset(range(self.rows)) or not places.keys() >= set(range(self.rows)):
            raise HearthError("internal", f"the places of {self.rows} rows are not 0, 1, ...")
        return [places[place] for place in range(self.rows)]


class RowOwner(Protocol):
    """Owner of state by the place of a row: caches, the sampler, a proposer."""

    def reorder(self, reorder: BatchReorder) -> None:
        """Move rows and admit new ones to their places."""


PATIENCE = 4
"""Chunks in which later rows may pass a prefilling row before no further rows are admitted."""


class RowState(Enum):
    """State of a row: live, or how it ended."""

    LIVE = "live"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


# Before Python 3.12 a member is looked up by Python code, which every row would run in each step.
_LIVE = RowState.LIVE


def tokens_to_generate(row: RowRequest, capacity: int) -> int:
    """Number of tokens that a row may generate: its `max_tokens`, or as many as fit."""
    asked = row.options.max_tokens
    return capacity - row.prompt_length if asked is None else asked


class DecodingRow:
    """One row of a running batch.

    `number` identifies its tokens in step results, `order` counts the rows admitted before it since
    none was live. It was admitted at `placed`, in seconds of the monotonic clock, once all rows had
    taken `prefill_from` seconds of prefill, and has paid for its own once they have decoded for
    `paid_from` seconds. `filled` counts the tokens that the caches hold
    once all queued steps have ended; `remaining_budget` the tokens up to its limit that none of
    these steps samples; `passed` the chunks that later rows had before it since its own last one.
    Rows with `speculation_disabled` take no trees, as their own have failed. Of the prompt `reused`
    tokens were cached before, and `drafted` entries of a draft engine. The first
    `exact_prefix_len` tokens have the slots of plain text; behind those a tree's path had other
    slots between its nodes.
    """

    __slots__ = (
        "_end_tokens",
        "_longest",
        "drafted",
        "exact_prefix_len",
        "filled",
        "initial",
        "number",
        "options",
        "order",
        "paid_from",
        "passed",
        "placed",
        "prefill_from",
        "prompt_length",
        "remaining_budget",
        "request",
        "reused",
        "speculation_disabled",
        "state",
        "token_ids",
    )

    def __init__(
        self, number: int, request: RowRequest, capacity: int, end_tokens: frozenset[int]
    ) -> None:
        self.number = number
        self.request = request
        self.token_ids = list(request.token_ids)
        self.initial: NDArray[np.int64] = np.array(request.token_ids, np.int64)
        self.prompt_length = request.prompt_length
        self.options = request.options
        self.speculation_disabled = False
        self.filled = self.passed = self.reused = self.drafted = self.order = 0
        self.placed = self.prefill_from = 0.0
        self.paid_from = math.inf
        self.exact_prefix_len = capacity
        self.state = _LIVE
        self._longest = request.prompt_length + tokens_to_generate(request, capacity)
        self.remaining_budget = self._longest - len(self.token_ids)
        self._end_tokens = frozenset[int]() if request.options.ignore_eos else end_tokens

    @property
    def prompt_left(self) -> int:
        """Tokens still to be prefilled."""
        return max(0, len(self.initial) - self.filled)

    @property
    def runs_on(self) -> bool:
        """True if a further step makes sense: the row is live, and its last token is not queued."""
        return self.remaining_budget > 0 and self.state is _LIVE

    @property
    def generated(self) -> list[int]:
        """The tokens beyond the prompt."""
        return self.token_ids[self.prompt_length :]

    def take(self, sample: RowToken | None) -> RowToken | None:
        """Append a sampled token, or fail when its logits were not finite, and report it.

        A row that left has nothing to report, nor has one whose logits were only checked.
        """
        if self.state is not _LIVE:
            return None
        if sample is None:
            return self.fail("non_finite")
        token_id = sample.token_id
        if token_id < 0:
            return None
        self.token_ids.append(token_id)
        sample.row = self.number
        if token_id in self._end_tokens:
            sample.finish = "stop"
        elif len(self.token_ids) >= self._longest:
            sample.finish = "length"
        if sample.finish is not None:
            self.state = RowState.FINISHED
        return sample

    def fail(self, code: str) -> RowToken:
        """End the row with an error and report it."""
        self.state = RowState.FAILED
        return RowToken(self.number, -1, error=code)


def all_left(rows: Sequence[DecodingRow]) -> bool:
    """Tell whether there were rows, and none of them is there any more."""
    for row in rows:
        if row.state is _LIVE:
            return False
    return bool(rows)


class DecodingInferenceContext:
    """The rows of a running batch by place, and how they are placed anew between two steps.

    `rows[i]` is row i of the engine. The first `decoding` rows decode; those behind them have
    prompt left, the shortest rest first. A row whose last token is still being sampled has left
    `rows` and is live until that token is known. `room` counts the slots that a step may write
    behind the filled ones, and a row leaves all but one of them free at its end. `owners` keep
    state by the places of rows, and move with them.
    """

    def __init__(
        self, config: LLMEngineRunnerConfig, room: int = 1, owners: Iterable[RowOwner] = ()
    ) -> None:
        self.owners = list(owners)
        self.rows: list[DecodingRow] = []
        self.decoding = 0
        self.capacity = config.max_kv_cache_capacity - (room - 1)
        self._places = config.max_supported_batch_size
        self._slots = config.max_kv_cache_capacity
        self._end_tokens = frozenset(config.eos_token_ids)
        # Slots that a decode step writes beyond the filled ones: only a prefilling row gets such.
        self._tree = room if room > 1 else 0
        self._coming: list[DecodingRow] = []
        self._by_number: dict[int, DecodingRow] = {}
        self._next = 0
        self._lost = False

    @property
    def any_live(self) -> bool:
        """True if a row has not ended."""
        # A generator would be one more call for each row of each step.
        for row in self._by_number.values():  # noqa: SIM110 - see above
            if row.state is _LIVE:
                return True
        return False

    @property
    def decoders(self) -> list[DecodingRow]:
        """The rows that decode, by place."""
        return self.rows[: self.decoding]

    @property
    def joiners(self) -> list[DecodingRow]:
        """The rows with prompt left, which lie behind those."""
        return self.rows[self.decoding :]

    @property
    def places(self) -> int:
        """Places that no row needs from the next step on."""
        going = sum(row.runs_on for row in self.rows)
        return self._places - going - sum(row.runs_on for row in self._coming)

    @property
    def free(self) -> int:
        """Number of places for new rows: none while later rows keep passing a prefilling one."""
        joiners = self.joiners
        closed = any(row.passed >= PATIENCE and row.runs_on for row in joiners)
        return 0 if closed else self.places

    @property
    def coming(self) -> list[DecodingRow]:
        """Rows that take their places by the next `arrange`."""
        return self._coming

    @property
    def stays(self) -> bool:
        """True if all rows keep their places and no new row waits."""
        if self._coming or self._lost:
            return False
        # As `runs_on`, of which there would be a call for each row of each step.
        for row in self.rows:  # noqa: SIM110 - see above
            if row.remaining_budget <= 0 or row.state is not _LIVE:
                return False
        return True

    def admit(
        self, requests: Sequence[RowRequest], numbers: Sequence[int] | None = None
    ) -> list[DecodingRow]:
        """Take rows, which get their places by the next `arrange`.

        No live row has one of the `numbers`. None count on from 0, and start again where no row is
        live.
        """
        if not self.any_live:
            self._next, self._by_number = 0, {}
        rows = [
            DecodingRow(number, request, self.capacity, self._end_tokens)
            for number, request in zip(
                numbers or range(self._next, self._next + len(requests)), requests, strict=True
            )
        ]
        for row in rows:
            row.order, self._next = self._next, self._next + 1
            self._by_number[row.number] = row
        self._coming += rows
        return rows

    def leave(self, number: int) -> None:
        """Let a row leave; unknown and ended rows are ignored."""
        row = self._by_number.get(number)
        if row is not None and row.state is _LIVE:
            row.state = RowState.CANCELLED

    def release(self, number: int, decode_s: float = math.inf) -> list[int] | None:
        """Let a row leave that would go on, with its tokens beyond the prompt; else None.

        A row whose last token is being sampled ends by itself. One that has not paid yet, now that
        all rows have decoded for `decode_s`, stays.
        """
        row = self._by_number.get(number)
        if row is None or not row.runs_on or row.paid_from > decode_s:
            return None
        row.state = RowState.CANCELLED
        return row.generated

    def fail_all(self) -> None:
        """Mark every row as failed: what the caches hold in any place is unknown."""
        for row in (*self.rows, *self._by_number.values()):
            row.state = RowState.FAILED
        self._lost = True

    def prefilled(self, lengths: Sequence[int]) -> int:
        """Count `lengths` prompt tokens of the first prefilling rows; return how many now decode.

        Those are the first of them, as they had the least prompt left.
        """
        joiners = self.joiners
        chunk = joiners[: len(lengths)]
        newest = max(row.order for row in chunk)
        ended = 0
        for row, added in zip(chunk, lengths, strict=True):
            row.filled += added
            row.passed = 0
            if not row.prompt_left:
                row.remaining_budget -= 1
                ended += 1
        for row in joiners[len(chunk) :]:
            row.passed += row.order < newest
        self.decoding += ended
        return ended

    def decoded(self) -> None:
        """Count a token of every decoding row."""
        for row in self.rows[: self.decoding]:
            row.filled += 1
            row.remaining_budget -= 1

    def arrange(
        self, unread: Iterable[tuple[DecodingRow, int]] = (), padding: int = 0
    ) -> BatchReorder | None:
        """Place the rows anew for the next step, and let the owners follow.

        None where all stay and no row is new.

        `unread` has the tokens that queued steps add to each row whose numbers are not read yet;
        behind them these steps wrote up to `padding` slots more.
        The last decoding rows fill the gaps of those that ended. Joiners close up and keep their
        order, and new rows take places among them.
        """
        before = self.rows
        if self.stays:
            return None
        staying = self.decoders
        place = 0
        while place < len(staying):
            if staying[place].runs_on:
                place += 1
                continue
            last = staying.pop()
            if place < len(staying):
                staying[place] = last
        rest = (row for row in (*self.joiners, *self._coming) if row.runs_on)
        joiners = sorted(rest, key=lambda row: row.prompt_left)
        self.rows, self.decoding, self._coming = [*staying, *joiners], len(staying), []
        self._by_number = {n: row for n, row in self._by_number.items() if row.state is _LIVE}
        places = {row: place for place, row in enumerate(before)}
        unseen: dict[DecodingRow, int] = {}
        for row, added in unread:
            unseen[row] = unseen.get(row, 0) + added
        found = self._reorder(places, unseen, padding)
        self._lost = False
        for owner in self.owners:
            owner.reorder(found)
        return found

    def _reorder(
        self, before: dict[DecodingRow, int], unseen: dict[DecodingRow, int], padding: int
    ) -> BatchReorder:
        """Return the reorder from the places `before` to those of `rows`."""
        fills: list[RowMove] = []
        downs: list[RowMove] = []
        ups: list[RowMove] = []
        assignments: list[tuple[int, DecodingRow]] = []
        for target, row in enumerate(self.rows):
            source = before.get(row)
            if source is None:
                assignments.append((target, row))
            elif source != target:
                into = fills if target < self.decoding else downs if target < source else ups
                into.append(RowMove(source, target, row.filled))
        moves = [*fills, *downs, *reversed(ups)]
        used = {move.target: move.used for move in moves}
        stale = self._stale(before, unseen, padding, used)
        return BatchReorder(len(self.rows), moves, assignments, stale)

    def _stale(
        self,
        before: dict[DecodingRow, int],
        unseen: dict[DecodingRow, int],
        padding: int,
        used: dict[int, int],
    ) -> list[DirtySlots]:
        """Slots of rows that left which may not be finite, less those that the next row fills."""
        if self._lost:
            return [DirtySlots(place, 0, self._slots) for place in range(self._places)]
        stale = []
        for row, place in before.items():
            if place < len(self.rows) and self.rows[place] is row:
                continue
            begin = row.filled - unseen.get(row, 0)
            if begin <= row.reused:
                # No numbers that follow from its prefix have been read.
                begin = 0
            # A decode step that ran padded wrote a token behind those of a prefilling row.
            behind = padding if row in unseen else 0
            end = row.filled + max(self._tree, bool(row.prompt_left), behind)
            if row.state is RowState.FAILED:
                begin, end = 0, self._slots
            begin, end = max(begin, used.get(place, 0)), min(end, self._slots)
            if begin < end:
                stale.append(DirtySlots(place, begin, end))
        return stale
