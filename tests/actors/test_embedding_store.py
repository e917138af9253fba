from __future__ import annotations

import random

from hearth.actors.arena import ArenaSlots, slot_bytes
from hearth.actors.messages import ImageTimes
from hearth.actors.scheduler.embedding_store import SlotState, StoredEmbeddings

SIZE = 1000
TIMES = ImageTimes(0.1, 0.2, 0.3)
A, B, C, D = b"a", b"b", b"c", b"d"


def store(rooms: int = 3) -> StoredEmbeddings:
    """With room for so many embeddings of `SIZE` bytes."""
    return StoredEmbeddings(ArenaSlots(rooms * slot_bytes(SIZE)))


def pin(made: StoredEmbeddings, rid: int, *keys: bytes) -> bool:
    return made.pin(rid, 0, dict.fromkeys(keys, SIZE))


def make(made: StoredEmbeddings, *keys: bytes) -> None:
    for key in keys:
        made.begin(key)
        made.finish(key, TIMES)


def test_what_was_made_is_there_for_the_next_who_asks() -> None:
    made = store()
    assert pin(made, 1, A)
    assert made.state(A) is SlotState.EMPTY
    slot = made.begin(A)
    assert made.state(A) is SlotState.BUSY
    made.finish(A, TIMES)
    made.release(1)
    assert pin(made, 2, A)
    assert (made.state(A), made.slot(A), made.times(A)) == (SlotState.READY, slot, TIMES)


def test_the_least_recently_used_goes_first_and_nothing_that_is_pinned() -> None:
    made = store()
    assert pin(made, 1, A, B, C)
    make(made, A, B, C)
    made.release(1)
    assert pin(made, 2, A)
    made.release(2)
    assert pin(made, 3, C)
    assert pin(made, 4, D)
    assert B not in made
    assert pin(made, 5, B)
    assert A not in made
    assert not pin(made, 6, A)
    assert {C, D, B} == {key for key in (A, B, C, D) if key in made}


def test_a_request_without_room_pins_nothing_and_costs_nobody_anything() -> None:
    made = store()
    assert pin(made, 1, A, B)
    make(made, A, B)
    made.release(1)
    assert pin(made, 2, C)
    assert not pin(made, 3, B, D, b"e")
    assert A in made
    assert B in made
    assert made.requests == [2]
    made.release(3)
    assert pin(made, 4, D, b"e")
    assert {A, B} & {key for key in (A, B) if key in made} == set()


def test_what_nobody_has_begun_goes_with_its_last_request() -> None:
    made = store()
    assert pin(made, 1, A)
    assert pin(made, 2, A)
    made.release(1)
    assert A in made
    made.release(2)
    assert A not in made
    assert made.used == 0


def test_what_is_being_written_stays_until_the_writer_has_answered() -> None:
    made = store(1)
    assert pin(made, 1, A)
    slot = made.begin(A)
    made.release(1)
    assert not pin(made, 2, B)
    made.fail(A)
    assert A not in made
    assert pin(made, 2, B)
    assert made.slot(B).offset == slot.offset
    made.begin(B)
    made.release(2)
    made.finish(B, TIMES)
    assert pin(made, 3, B)


def test_what_a_dead_writer_had_is_not_given_to_others_before_it_is_freed() -> None:
    made = store(1)
    assert pin(made, 1, A)
    made.begin(A)
    slot = made.abandon(A)
    made.release(1)
    assert not pin(made, 2, A)
    made.free(slot)
    assert pin(made, 2, A)
    assert made.state(A) is SlotState.EMPTY


def test_one_key_twice_in_a_request_is_pinned_once() -> None:
    made = store(1)
    assert made.holds({A: SIZE})
    assert not made.holds({A: SIZE, B: SIZE})
    assert pin(made, 1, A, A)
    make(made, A)
    made.release(1)
    assert pin(made, 2, B)


def test_nothing_leaks_whatever_happens() -> None:
    chance = random.Random(3)
    made, busy, forsaken = store(5), set[bytes](), []
    for rid in range(3000):
        match chance.randrange(5):
            case 0 | 1:
                keys = chance.sample([A, B, C, D, b"e", b"f", b"g"], 2)
                made.pin(rid, 0, {key: chance.randrange(2 * SIZE) for key in keys})
            case 2 if made.requests:
                made.release(chance.choice(made.requests))
            case 3:
                busy |= begun(made)
            case 4 if busy:
                key = busy.pop()
                end = chance.choice((made.fail, lambda one: made.finish(one, TIMES), None))
                forsaken += [] if end else [made.abandon(key)]
                (end or len)(key)
    for key in busy:
        made.fail(key)
    for slot in forsaken:
        made.free(slot)
    for rid in made.requests:
        made.release(rid)
    assert made.pin(-1, 0, {b"all": 5 * slot_bytes(SIZE) - slot_bytes(0)})
    assert len(made) == 1


def begun(made: StoredEmbeddings) -> set[bytes]:
    """Begin what is empty."""
    empty = {k for k in (A, B, C, D) if k in made and made.state(k) is SlotState.EMPTY}
    for key in empty:
        made.begin(key)
    return empty
