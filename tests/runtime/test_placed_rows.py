"""Random lives of rows against a model of every place's slots."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.batch import DecodingInferenceContext, DecodingRow, RowState
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.request import RequestOptions, RowRequest

PLACES, SLOTS = 4, 64
CONFIG = simulated_config(
    vocab_size=50, eos_token_ids=(0, 7), max_batch=PLACES, capacity=SLOTS, prefill_chunk=16
)


def _request(tokens: int, max_tokens: int) -> RowRequest:
    options = RequestOptions(max_tokens=max_tokens)
    return RowRequest(token_ids=[1] * tokens, prompt_length=tokens, options=options)


Unread = list[tuple[DecodingRow, int]]


class House:
    """A model of what owners hold by place: which slot of which row, and what may not be finite.

    A slot that nobody has read is `bad`. Steps, and what they leave behind a row, are as a device
    that runs ahead and pads has them.
    """

    def __init__(self, room: int) -> None:
        self.context = DecodingInferenceContext(CONFIG, room)
        self.room = room
        self.slots: list[list[object]] = [[None] * SLOTS for _ in range(PLACES)]
        self.bad: list[set[int]] = [set() for _ in range(PLACES)]
        self.queued: list[Unread] = []

    def arrange(self) -> None:
        before = self.context.rows
        reorder = self.context.arrange(pair for step in self.queued for pair in step)
        if reorder is None:
            return
        taken = {place for place, row in enumerate(before) if row.runs_on}
        for source, target, used in reorder.moves:
            assert source in taken
            assert target not in taken
            taken ^= {source, target}
            self.slots[target][:used] = self.slots[source][:used]
            moved = {slot for slot in self.bad[source] if slot < used}
            self.bad[target] = {slot for slot in self.bad[target] if slot >= used} | moved
        for place, *_ in reorder.assignments:
            assert place not in taken
            taken.add(place)
        assert taken == set(range(reorder.rows)) == set(range(len(self.context.rows)))
        for place, begin, end in reorder.stale:
            assert 0 <= begin < end <= SLOTS
            self.bad[place] -= set(range(begin, end))

    def write(self, rows: list[DecodingRow], lengths: list[int], first: int) -> None:
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True), first):
            for slot in range(row.filled, row.filled + length):
                self.slots[place][slot] = (row, slot)
                self.bad[place].add(slot)
        self.queued.append(list(zip(rows, lengths, strict=True)))

    def decode(self, width: int) -> None:
        """A decode step, or a round of one accepted node, of all places."""
        rows = self.context.rows
        for place, row in enumerate(rows):
            tree = width if place < self.context.decoding else 1
            self.bad[place] |= set(range(row.filled, row.filled + tree))
        self.write(self.context.decoders, [1] * self.context.decoding, 0)
        self.context.decoded()

    def prefill(self, rows: int, width: int) -> None:
        joiners = self.context.joiners[:rows]
        lengths = [min(width, row.prompt_left) for row in joiners]
        self.write(joiners, lengths, self.context.decoding)
        self.context.prefilled(lengths)

    def read(self, *, fails: bool) -> None:
        """The numbers of the oldest step are finite, but for its first row where that fails."""
        for row, _ in self.queued.pop(0):
            if fails and row.state is RowState.LIVE:
                row.take(None)
                fails = False
            elif row in self.context.rows and row.state is not RowState.FAILED:
                place = self.context.rows.index(row)
                self.bad[place] -= set(range(row.filled)) - self.unread(row)

    def unread(self, row: DecodingRow) -> set[int]:
        added = sum(count for step in self.queued for other, count in step if other is row)
        return set(range(row.filled - added, row.filled))

    def check(self) -> None:
        context = self.context
        lefts = [row.prompt_left for row in context.rows]
        assert not any(lefts[: context.decoding])
        assert all(lefts[context.decoding :])
        assert lefts[context.decoding :] == sorted(lefts[context.decoding :])
        assert len(context.rows) + context.places <= PLACES + len(context.rows)
        for place, row in enumerate(context.rows):
            assert self.slots[place][: row.filled] == [(row, slot) for slot in range(row.filled)]
            # Of slots that the next step does not write, only those of its own steps are unread.
            tree = set(range(row.filled, row.filled + self.room))
            assert self.bad[place] <= self.unread(row) | tree


EVENT = st.tuples(
    st.sampled_from(["admit", "chunk", "decode", "round", "read", "fail", "leave", "end"]),
    st.integers(0, 7),
    st.integers(1, 40),
)


@settings(max_examples=300)
@given(st.lists(EVENT, min_size=20, max_size=60), st.sampled_from([1, 5]))
def test_rows_keep_their_slots_and_get_none_of_others(
    events: list[tuple[str, int, int]], room: int
) -> None:
    house = House(room)
    context = house.context
    for kind, chosen, size in events:
        if kind == "admit" and context.free:
            assert 0 <= context.free <= PLACES
            context.admit([_request(size, max_tokens=1 + chosen)])
        elif kind in {"leave", "end"} and context.rows:
            row = context.rows[chosen % len(context.rows)]
            context.leave(row.number)
        elif kind in {"read", "fail"} and house.queued:
            house.read(fails=kind == "fail")
        elif kind in {"chunk", "decode", "round"}:
            house.arrange()
            house.check()
            if kind == "chunk" and context.joiners:
                house.prefill(1 + chosen % 2, size)
            elif kind != "chunk" and context.decoding:
                house.decode(room if kind == "round" else 1)
