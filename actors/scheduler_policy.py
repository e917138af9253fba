from __future__ import annotations

import math
from collections.abc import Iterable

from hearth.actors import encodings
from hearth.actors.adapter_turns import AdapterTurns
from hearth.actors.admission import (
    ADAPTER_GONE,
    EXPIRED,
    GUILTY,
    Refusal,
    queue_refusal,
    size_refusal,
)
from hearth.actors.encodings import Encodings, ImageArenas
from hearth.actors.executor_messages import Offer, Release, Revoke, Unpin
from hearth.actors.first_places import Claim, FirstPlaces
from hearth.actors.house import HeldRow, House, revoke
from hearth.actors.messages import (
    Accepted,
    Cancel,
    ExecutorGone,
    ExecutorLimits,
    ExecutorReady,
    RowsCut,
    RowsEnded,
    RowsFailed,
    RowsPlaced,
    RowsReturned,
    SchedulerReport,
    Submit,
)
from hearth.actors.offers import Offers
from hearth.actors.releases import Releases
from hearth.actors.settings import PolicySettings, Reloadable
from hearth.actors.suspects import Suspects
from hearth.actors.waiting_queue import Entry
from hearth.actors.waiting_room import WaitingRoom

Decision = (
    Accepted
    | RowsFailed
    | RowsCut
    | ExecutorGone
    | Offer
    | Revoke
    | Release
    | Unpin
    | Cancel
    | SchedulerReport
    | encodings.Sent
)
"""What is to be sent: Accepted, Embedded and SchedulerReport to the front door, RowsFailed, RowsCut
and ExecutorGone to the tokenizer, Encode and DropWork to the encoder, the others to the executor.
"""

_LOOK_S = 1.0
"""How often the shares of clients are compared while requests wait."""


class SchedulerPolicy:
    """Says who runs next: requests, word of rows and clock in, decisions out; no I/O.

    Feed it what happens, then `tick`: only `tick` offers, revokes, releases and expires. The
    executor is offered as many rows ahead as it has places, in the order of the queue, and places
    them as places free. Where the house is full, a row gives way to the first that waits once it
    has had its place for `hold_s`, and queues up as if it had just come; or at once to a higher
    priority, and stands right behind it. With synchronous batches nobody is offered while a row is
    held, and all of them give way together.
    """

    def __init__(self, settings: PolicySettings, arenas: ImageArenas | None = None) -> None:
        self._settings = Reloadable(settings)
        self._room = WaitingRoom(settings.ageing_s)
        self._queue = self._room.queue
        self._house = House(self._settings)
        self._turns = AdapterTurns(self._house, self._queue, self._settings)
        self._first_places = FirstPlaces(self._house, self._queue, self._turns)
        # Rows that a dead executor was offered; the tokenizer will say whether it had begun them.
        self._limbo: dict[int, HeldRow] = {}
        self._suspects = Suspects()
        self._images = Encodings(self._room, self._suspects, arenas)
        self._releases = Releases(self._house, self._queue, self._suspects)
        self._offers = Offers(self._house, self._queue, self._suspects, self._turns, self._settings)
        self._limits: ExecutorLimits | None = None
        self._incarnation = 0
        self._present = False
        self._ticked = 0.0
        self._rows = self._requeued = self._refused = 0

    def adopt(self, settings: PolicySettings) -> None:
        """Go on by other settings, all but `ageing_s`, by which requests stand in their places.

        What has been admitted stays, also where less would be now.
        """
        self._settings.current = settings

    def submit(self, message: Submit, now: float) -> list[Decision]:
        """Admit a request or refuse it; of two with one number the first alone is heard."""
        request = message.request
        if self._is_open(request.rid):
            return []
        entry = Entry(request, message.token_ids, message.encoded, now, images=message.images)
        refusal = size_refusal(entry, self._settings.current, self._limits)
        if refusal is None and request.deadline is not None and request.deadline <= now:
            refusal = EXPIRED
        self._suspects.forget(now)
        if refusal is None and self._suspects.is_guilty(entry):
            refusal = GUILTY
        own = self._tokens_of(request.client)
        refusal = refusal or queue_refusal(entry, *self._waiting(), own, self._settings.current)
        share = self._settings.current.client_queue_share
        refusal = refusal or self._images.admit(entry, self._is_open, share)
        if refusal is not None:
            self._refused += 1
            return [_failed([request.rid], refusal)]
        self._offers.arrived(now)
        self._room.push(entry)
        return self._accept(entry) if self._limits else []

    def cancel(self, rid: int) -> list[Decision]:
        """Forget a request; one that the executor holds is cancelled there too."""
        if self._room.remove(rid) is not None or self._limbo.pop(rid, None) is not None:
            return []
        row = self._house.get(rid)
        if row is None or row.asked == "cancel":
            return []
        row.asked = "cancel"
        return [Cancel(rid)]

    def adapter_gone(self, name: str) -> list[Decision]:
        """Fail all that wait for an adapter which was removed; an executor fails what it holds."""
        rids = [entry.rid for entry in self._room if entry.adapter == name]
        for rid in rids:
            self._room.remove(rid)
        return [_failed(rids, ADAPTER_GONE)] if rids else []

    def rows_placed(self, message: RowsPlaced, now: float) -> None:
        """These rows have places."""
        for rid in message.rids:
            row = self._find(rid, message.incarnation)
            if row is not None:
                row.placed = now
                self._rows += 1
                self._turns.placed(row, now)
                if row.asked == "revoke":
                    row.asked = ""

    def rows_ended(self, message: RowsEnded, now: float) -> None:
        """These rows have left, or have had their first tokens."""
        for rid in message.begun:
            if (row := self._find(rid, message.incarnation)) is not None:
                row.begun = now
                self._turns.begun(row, now)
        for rid in message.rids:
            row = self._leave(rid, message.incarnation, now)
            if row is not None and row.placed is not None:
                self._suspects.ended(row.entry)
        self._offers.note_idle(now)

    def rows_failed(self, message: RowsFailed, now: float) -> list[Decision]:
        """The executor has told the failure of these rows, or who saw it die has."""
        if message.code != "executor_failed":
            self.rows_ended(RowsEnded(message.incarnation, message.rids), now)
            return []
        failed = []
        for rid in message.rids:
            # The death that put a row in limbo has been noted.
            noted = rid in self._limbo
            row = self._leave(rid, message.incarnation, now)
            if row is not None and not noted:
                failed.append(row.entry)
        self._offers.note_idle(now)
        return self._note_failure(failed, now)

    def rows_returned(self, message: RowsReturned, now: float) -> list[Decision]:
        """Released rows stand behind whom they gave way to, unplaced ones where they stood."""
        guilty = []
        for rid in message.unplaced:
            row = self._leave(rid, message.incarnation, now)
            if row is None or row.asked == "cancel":
                continue
            if self._suspects.is_guilty(row.entry):
                guilty.append(rid)
            else:
                self._queue.push(row.entry)
        for continuation in message.released:
            row = self._leave(continuation.rid, message.incarnation, now)
            if row is None or row.asked == "cancel":
                continue
            row.entry.generated, row.entry.lost = list(continuation.generated), now
            row.entry.queued = max(row.entry.queued, min(now, row.behind))
            self._queue.push(row.entry)
            self._requeued += 1
        # After a release others have waited long enough: there is nothing to wait for.
        self._offers.note_idle(now, waited=bool(message.released))
        return self._refuse_guilty(guilty)

    def executor_ready(self, message: ExecutorReady, now: float) -> list[Decision]:
        """A new executor waits for work; requests that came before its limits are checked now."""
        decisions = self.executor_lost("another executor has taken over", now)
        self._limits = limits = message.limits
        self._house.places, self._incarnation = limits.max_batch, message.incarnation
        self._present = True
        self._offers.executor_ready(message.incarnation, now)
        self._images.executor_ready()
        for entry in list(self._room):
            refusal = size_refusal(entry, self._settings.current, limits)
            if refusal is None:
                decisions += self._accept(entry)
                continue
            self._room.remove(entry.rid)
            if entry.generated:
                # The executor before could hold more, and what its client has stays good.
                decisions.append(RowsCut([entry.rid]))
            else:
                self._refused += 1
                decisions.append(_failed([entry.rid], refusal))
        return decisions

    def executor_retires(self) -> None:
        """Offer nothing more until the next executor is ready; what was offered comes back."""
        self._present = False
        self._offers.executor_retires()

    def executor_lost(self, reason: str, now: float, *, blameless: bool = False) -> list[Decision]:
        """Fail all that was running; what waits goes on waiting, and so does what had not begun.

        Unless it is `blameless`, what ran is suspected of it.
        """
        self._present = False
        self._offers.executor_lost(now)
        decisions: list[Decision] = list(self._images.executor_lost(reason))
        lost = self._house.clear()
        message = f"the executor was lost ({reason}): send the request again"
        running = [row.rid for row in lost if row.placed is not None and row.asked != "cancel"]
        unknown = {row.rid: row for row in lost if row.placed is None and row.asked != "cancel"}
        self._limbo |= unknown
        if running:
            decisions.append(RowsFailed(0, running, "executor_failed", message))
        if lost:
            decisions.append(ExecutorGone(self._incarnation, list(unknown), message))
        failed = [*(row.entry for row in lost), *self._images.take_lost()]
        return decisions if blameless else decisions + self._note_failure(failed, now)

    def images_told(self, message: encodings.Told, now: float) -> list[Decision]:
        """Encoder or executor have said what became of images."""
        told = self._images.hear(message)
        return [*told, *self._note_failure(self._images.take_lost(), now)]

    def tick(self, now: float) -> list[Decision]:
        """Act on the clock: expire, offer who is next, release who has had its place for long."""
        self._suspects.forget(now)
        self._ticked = now
        decisions = [*self._expire(now), *self._images.act(self._is_open), *self._turns.tick(now)]
        claim = self._claim(now)
        if claim is None or claim.due > now:
            decisions += self._offers.next(now)
        else:
            self._house.claimant = claim.entry
            decisions += [*self._offers.next(now), *self._first_places.admit(claim)]
        return [
            *decisions,
            *self._releases.due(now, synchronous=self._settings.current.synchronous),
        ]

    def next_wake(self) -> float | None:
        """When `tick` has something to do next, if nothing happens before."""
        times = [self._room.next_deadline, self._offers.start_time()]
        times += [row.deadline for row in self._house if row.asked != "cancel"]
        times += self._releases.times(synchronous=self._settings.current.synchronous)
        if (turn := self._turns.due) < math.inf:
            times.append(turn)
        # One that is due already waits for word of the executor.
        if (claim := self._claim(self._ticked)) is not None and claim.due > self._ticked:
            times.append(claim.due)
        if self._present and self._waiting()[0]:
            # Who has had much less than whom changes with time.
            times.append(self._ticked + _LOOK_S)
        return min((time for time in times if time is not None), default=None)

    def report(self, rid: int) -> SchedulerReport:
        """What waits and runs now, and counts since the start."""
        queued, tokens = self._waiting()
        return SchedulerReport(
            rid=rid,
            running=self._house.running,
            places=self._house.places,
            queued=queued,
            queued_tokens=tokens,
            rows=self._rows,
            requeued=self._requeued,
            refused=self._refused,
            embeddings=self._images.used,
        )

    def _waiting(self) -> tuple[int, int]:
        """How many requests wait, and their prompt tokens."""
        behind = self._house.waiting
        tokens = self._room.prompt_tokens + sum(row.entry.prompt_tokens for row in behind)
        return len(self._room) + len(behind), tokens

    def _tokens_of(self, client: int) -> int:
        """The prompt tokens that a client has waiting."""
        behind = [row.entry for row in self._house.waiting if row.client == client]
        return self._room.tokens_of(client) + sum(one.prompt_tokens for one in behind)

    def _is_open(self, rid: int) -> bool:
        return rid in self._room or rid in self._limbo or self._house.get(rid) is not None

    def _accept(self, entry: Entry) -> list[Decision]:
        if entry.accepted:
            return []
        entry.accepted = True
        return [Accepted(entry.rid, entry.prompt_tokens, entry.encoded)]

    def _find(self, rid: int, incarnation: int) -> HeldRow | None:
        row = self._limbo.get(rid) or self._house.get(rid)
        return row if row is not None and row.incarnation == incarnation else None

    def _leave(self, rid: int, incarnation: int, now: float) -> HeldRow | None:
        """Take out a row of which that executor, or who saw it die, has told the last."""
        row = self._find(rid, incarnation)
        if row is not None and self._limbo.pop(rid, None) is None:
            self._house.remove(rid, now)
        return row

    def _note_failure(self, entries: Iterable[Entry], now: float) -> list[Decision]:
        self._suspects.failed(entries, now)
        guilty = [entry.rid for entry in self._room if self._suspects.is_guilty(entry)]
        for rid in guilty:
            self._room.remove(rid)
        # Twins of what failed run alone, or not at all.
        twins = [row for row in self._house.offered if self._suspects.runs_alone(row.entry)]
        return [*self._refuse_guilty(guilty), *revoke(twins)]

    def _refuse_guilty(self, rids: list[int]) -> list[Decision]:
        self._refused += len(rids)
        return [_failed(rids, GUILTY)] if rids else []

    def _claim(self, now: float) -> Claim | None:
        if self._house.closed or not self._present:
            return None
        claim = self._first_places.next(now, synchronous=self._settings.current.synchronous)
        return None if claim is None or self._suspects.runs_alone(claim.entry) else claim

    def _expire(self, now: float) -> list[Decision]:
        running = [row.rid for row in self._house if row.asked != "cancel" and row.is_due(now)]
        decisions: list[Decision] = []
        for rid in running:
            decisions += self.cancel(rid)
        expired = running + [entry.rid for entry in self._room.take_expired(now)]
        if expired:
            decisions.append(_failed(expired, EXPIRED))
        return decisions


def _failed(rids: list[int], refusal: Refusal) -> RowsFailed:
    return RowsFailed(0, rids, refusal.code, refusal.message, refusal.field, refusal.ahead)
