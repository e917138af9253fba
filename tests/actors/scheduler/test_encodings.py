from __future__ import annotations

import random

from msgspec import structs

from hearth.actors.arena import ArenaSlots, slot_bytes
from hearth.actors.messages import (
    Accepted,
    DropWork,
    Embedded,
    Encode,
    Encoded,
    EncodeFailed,
    EncoderLost,
    EncoderReady,
    Failed,
    ImageTimes,
    Patched,
    RunVisionEncoder,
)
from hearth.actors.scheduler.embedding_store import SlotState, StoredEmbedding, StoredEmbeddings
from hearth.actors.scheduler.encoder_scheduler import IN_FLIGHT
from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.runtime.images import ImageLayout
from tests.actors.scheduler.images import (
    LIMITS,
    SETTINGS,
    SIZE,
    TIMES,
    TOKEN_BYTES,
    TOKENS,
    Harness,
    arenas,
    submit_images,
)
from tests.actors.scheduler.simulation import ready, submit


def test_a_row_is_offered_once_all_of_its_embeddings_are_there() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "cat", "dog"))
    assert harness.take(Accepted) == [Accepted(1, 11)]
    cat, dog = harness.take(Encode)
    assert cat.patches != dog.patches
    harness.encode(dog.number)
    assert harness.offered() == {}
    harness.encode(cat.number)
    (told,) = harness.take(Embedded)
    assert told == Embedded(1, 2 * TOKENS, 0, ImageTimes(0.2, 0.4, 0.8), [SIZE] * 2)
    first, second = harness.offered()[1].images
    assert (first.slot, second.slot) == (cat.target, dog.target)
    assert [one.start for one in (*first.spans, *second.spans)] == [1, 6]


def test_text_goes_on_while_images_are_encoded() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "cat"), submit(2))
    assert list(harness.offered()) == [2]


def test_what_is_there_already_is_not_encoded_again() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "cat"))
    harness.encode(harness.take(Encode)[0].number)
    harness.end(1)
    harness.take(Embedded)
    harness.offered()
    harness.submit(submit_images(2, "cat", "cat"))
    assert harness.take(Encode) == []
    assert harness.take(Embedded) == [Embedded(2, 2 * TOKENS, 2, ImageTimes(), [SIZE] * 2)]
    assert list(harness.offered()) == [2]


def test_two_requests_with_one_picture_wait_for_one_piece_of_work() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "cat"), submit_images(2, "cat"))
    (one,) = harness.take(Encode)
    harness.encode(one.number)
    assert [told.rid for told in harness.take(Embedded)] == [1, 2]
    assert set(harness.offered()) == {1, 2}


def test_several_replies_about_a_picture_encode_it_once_and_keep_it() -> None:
    harness = Harness(arenas(embeddings=1))
    harness.submit(structs.replace(submit_images(1, "cat"), siblings=[2, 3]))
    (one,) = harness.take(Encode)
    harness.encode(one.number)
    slot = harness.offered()[1].images[0].slot
    # The first one has ended before the others begin, and somebody asks for its room.
    harness.tell(placed=[1])
    harness.policy.cancel(1)
    harness.tell(slot_times={1: 0.0}, finished=[1])
    harness.submit(submit_images(7, "dog"))
    assert harness.failed() == [([7], "queue_full", "image_cache_bytes")]
    rows = harness.offered()
    assert {rid: row.images[0].slot for rid, row in rows.items()} == {2: slot, 3: slot}
    assert harness.take(Encode) == []
    harness.tell(placed=[2, 3])
    harness.tell(finished=[2, 3])
    harness.submit(submit_images(8, "dog"))
    assert len(harness.take(Encode)) == 1


def test_work_is_sent_in_the_order_of_the_queue_and_by_turns_of_clients() -> None:
    harness = Harness(encoder=False)
    for rid in range(1, 20):
        harness.submit(submit_images(rid, str(rid), client=1))
    harness.submit(submit_images(20, "other", client=2))
    harness.submit(submit_images(21, "urgent", client=1, priority=5))
    harness.hear(EncoderReady("w"))
    assert harness.senders() == [21, 20, 1, 2, 3, 4, 5, 6][:IN_FLIGHT]
    harness.submit(submit_images(22, "late", client=3))
    harness.encode(1)
    assert harness.senders() == [22]


def test_work_waits_for_room_in_the_arena_of_patches() -> None:
    harness = Harness(arenas(patches=2))
    harness.submit(*(submit_images(rid, str(rid)) for rid in (1, 2, 3)))
    first, second = harness.take(Encode)
    harness.encode(first.number)
    (third,) = harness.take(Encode)
    assert third.patches.offset == first.patches.offset
    assert third.number not in {first.number, second.number}


def test_what_fits_never_is_too_large_and_what_does_not_fit_now_is_refused_for_now() -> None:
    harness = Harness(arenas(patches=2, embeddings=2))
    harness.submit(submit_images(1, "a", "b", "c"))
    assert harness.failed() == [([1], "image_too_large", "image_cache_bytes")]
    harness.submit(submit_images(2, "a", layout=ImageLayout(64, 64, (1, 20, 20), TOKENS)))
    assert harness.failed() == [([2], "image_too_large", "images[0]")]
    harness.submit(submit_images(3, "a"), submit_images(4, "b", "c"))
    assert harness.failed() == [([4], "queue_full", "image_cache_bytes")]
    harness.submit(submit_images(5, "a", "b"))
    assert harness.failed() == []
    harness.cancel(5)
    harness.submit(submit_images(6, "c"))
    assert harness.failed() == [([6], "queue_full", "image_cache_bytes")]
    (_, b) = harness.take(Encode)
    harness.hear(EncodeFailed(b.number, "cancelled", "dropped"))
    harness.submit(submit_images(7, "c"))
    assert harness.failed() == []


def test_a_client_leaves_room_for_the_images_of_others() -> None:
    harness = Harness(arenas(embeddings=8))
    names = [str(number) for number in range(12)]
    for rid, name in enumerate(names[:8], 1):
        harness.submit(submit_images(rid, name, client=7))
    assert harness.failed() == [
        ([7], "too_many_requests", "client_queue_share"),
        ([8], "too_many_requests", "client_queue_share"),
    ]
    harness.submit(submit_images(9, "of another", client=8))
    assert harness.failed() == []
    harness.cancel(1)
    harness.submit(submit_images(10, "0", client=8))
    assert harness.failed() == []


def test_an_image_without_a_size_is_refused() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "a", layout=ImageLayout(0, 0, (0, 0, 0), 0)))
    assert harness.failed() == [([1], "image_invalid", "images[0]")]


def test_a_text_model_refuses_images() -> None:
    policy = SchedulerPolicy(SETTINGS)
    (failed,) = policy.submit(submit_images(1, "cat"), 0.0)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.field) == ("unsupported_option", "messages")


def test_a_failure_is_that_of_all_who_wait_for_the_picture_and_of_nobody_else() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "dog", "bad"), submit_images(2, "bad"), submit_images(3, "dog"))
    dog, bad = harness.take(Encode)
    harness.hear(EncodeFailed(bad.number, "image_invalid", "it is no picture"))
    assert harness.failed() == [
        ([1], "image_invalid", "images[1]"),
        ([2], "image_invalid", "images[0]"),
    ]
    harness.encode(dog.number)
    assert list(harness.offered()) == [3]


def test_work_whose_sender_has_gone_is_tried_again_for_who_still_waits() -> None:
    harness = Harness()
    harness.submit(*(submit_images(rid, "cat") for rid in (1, 2, 3)))
    assert harness.senders() == [1]
    harness.cancel(1)
    harness.hear(EncodeFailed(1, "image_invalid", "it is no picture"))
    assert harness.failed() == []
    assert harness.senders() == [2]
    # Its sender has ended for the front door, and the word of that is still on its way.
    harness.hear(EncodeFailed(2, "internal", "a piece of shared memory has been given to another"))
    assert harness.failed() == [([2], "internal", "images[0]")]
    assert harness.senders() == [3]


def test_a_cancel_reaches_the_encoder_once_nobody_waits() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "cat"), submit_images(2, "cat"))
    (one,) = harness.take(Encode)
    harness.cancel(1)
    harness.cancel(2)
    assert harness.take(DropWork) == [DropWork([one.number])]
    harness.cancel(2)
    assert harness.take(DropWork) == []
    harness.submit(submit_images(3, "cat"))
    assert harness.take(Encode) == []
    harness.hear(EncodeFailed(one.number, "cancelled", "nobody waits for it any more"))
    assert harness.senders() == [3]


def test_a_deadline_ends_a_request_that_waits_for_embeddings() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "cat", deadline=1.0))
    assert harness.policy.next_wake() == 1.0
    harness.now = 1.0
    harness.does([])
    assert harness.failed() == [([1], "deadline_exceeded", "deadline_s")]
    assert len(harness.take(DropWork)) == 1


def test_a_crash_of_the_encoder_ends_what_it_had_and_nothing_else() -> None:
    harness = Harness(arenas(patches=1, embeddings=2))
    harness.submit(submit_images(1, "cat"), submit_images(2, "dog"), submit(3))
    (cat,) = harness.take(Encode)
    harness.hear(EncoderLost("it was ended by SIGKILL"))
    assert harness.failed() == [([1], "encoder_failed", "images[0]")]
    assert harness.take(Encode) == []
    harness.submit(submit_images(4, "cat"))
    # The dead one may still write to what it had: nobody gets that yet.
    assert harness.failed() == [([4], "queue_full", "image_cache_bytes")]
    harness.encode(cat.number)
    harness.hear(EncoderReady("w"))
    assert harness.senders() == [2]
    harness.submit(submit_images(5, "cat"))
    assert harness.failed() == []
    assert list(harness.offered()) == [3]


def test_a_picture_that_kills_each_encoder_is_sent_alone_and_then_refused() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "poison"), submit_images(2, "dog"))
    assert harness.senders() == [1, 2]
    harness.hear(EncoderLost("killed"))
    assert len(harness.failed()) == 2
    harness.hear(EncoderReady("w"))
    harness.submit(submit_images(3, "cat"), submit_images(4, "poison"), submit_images(5, "dog"))
    assert harness.senders() == [3]
    harness.encode(3)
    assert harness.senders() == [4]
    harness.hear(EncoderLost("killed"))
    assert harness.failed() == [([4], "encoder_failed", "images[0]")]
    harness.hear(EncoderReady("w"))
    assert harness.senders() == [5]
    harness.submit(submit_images(6, "poison"))
    assert harness.failed() == [([6], "repeated_failure", None)]
    harness.encode(5)
    harness.submit(submit_images(7, "owl"), submit_images(8, "elk"))
    assert harness.senders() == [7, 8]


def test_a_row_that_was_put_back_finds_its_embeddings_still_there() -> None:
    harness = Harness(arenas(embeddings=1))
    harness.submit(submit_images(1, "cat"))
    harness.encode(harness.take(Encode)[0].number)
    images = harness.offered()[1].images
    harness.tell(placed=[1])
    harness.tell(preempted={1: [7]})
    row = harness.offered()[1]
    assert (row.images, row.token_ids[-1], row.prompt_length) == (images, 7, 6)
    harness.submit(submit_images(2, "dog"))
    assert harness.failed() == [([2], "queue_full", "image_cache_bytes")]


def test_embeddings_outlive_an_executor_and_those_who_had_not_begun_are_offered_again() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "cat"))
    harness.encode(harness.take(Encode)[0].number)
    images = harness.offered()[1].images
    harness.does(harness.policy.executor_lost("killed", harness.now))
    harness.does(harness.policy.executor_ready(ready(LIMITS, 2), harness.now))
    assert harness.offered()[1].images == images
    assert harness.take(Encode) == []


def test_embeddings_stay_while_the_executor_has_not_said_that_a_cancelled_row_left() -> None:
    harness = Harness(arenas(embeddings=1))
    harness.submit(submit_images(1, "cat"))
    harness.encode(harness.take(Encode)[0].number)
    harness.tell(placed=[1])
    harness.cancel(1)
    harness.submit(submit_images(2, "dog"))
    assert harness.failed() == [([2], "queue_full", "image_cache_bytes")]
    harness.end(1)
    harness.submit(submit_images(3, "dog"))
    assert harness.failed() == []


def test_images_count_among_those_that_wait() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "cat"))
    report = harness.policy.report(0)
    assert (report.queued, report.queued_tokens) == (1, 6)
    assert report.embeddings == slot_bytes(TOKENS * TOKEN_BYTES)
    assert SchedulerPolicy(SETTINGS).report(0).embeddings is None


def test_many_questions_about_one_picture_take_its_memory_once() -> None:
    harness = Harness(arenas(embeddings=8))
    for rid in range(1, 21):
        harness.submit(submit_images(rid, "cat", client=7))
    assert harness.failed() == []
    for rid in range(21, 28):
        harness.submit(submit_images(rid, str(rid), client=7))
    assert harness.failed() == [
        ([26], "too_many_requests", "client_queue_share"),
        ([27], "too_many_requests", "client_queue_share"),
    ]
    harness.submit(submit_images(28, "cat", client=7), submit_images(29, "cat", client=8))
    assert harness.failed() == []


def test_a_picture_that_kills_each_executor_is_refused_as_well() -> None:
    harness = Harness()
    for rid in (1, 2):
        harness.submit(submit_images(rid, "poison"))
        harness.hear(Patched(rid, TIMES))
        assert len(harness.take(RunVisionEncoder)) == 1
        harness.does(harness.policy.executor_lost("killed", harness.now))
        assert harness.failed() == [([rid], "executor_failed", "images[0]")]
        harness.does(harness.policy.executor_ready(ready(LIMITS, 1 + rid), harness.now))
    harness.submit(submit_images(3, "poison"))
    assert harness.failed() == [([3], "repeated_failure", None)]


def test_on_a_gpu_the_executor_runs_the_tower() -> None:
    harness = Harness()
    harness.submit(submit_images(1, "cat"))
    (cat,) = harness.take(Encode)
    harness.hear(Patched(cat.number, ImageTimes(0.1, 0.2)))
    (run,) = harness.take(RunVisionEncoder)
    assert (run.patches, run.target, run.layout) == (cat.patches, cat.target, cat.work.layout)
    harness.tell(images=[Encoded(run.number, ImageTimes(engine_s=0.4))])
    assert harness.take(Embedded)[0].times == TIMES
    assert list(harness.offered()) == [1]


def test_a_tower_that_fails_or_dies_ends_what_it_had() -> None:
    harness = Harness(arenas(patches=2))
    harness.submit(*(submit_images(rid, str(rid)) for rid in (1, 2, 3)))
    one, two = harness.take(Encode)
    harness.hear(Patched(one.number, TIMES))
    assert len(harness.take(RunVisionEncoder)) == 1
    harness.tell(images=[EncodeFailed(one.number, "encoder_failed", "the tower failed")])
    assert harness.failed() == [([1], "encoder_failed", "images[0]")]
    harness.hear(Patched(two.number, TIMES))
    assert len(harness.take(RunVisionEncoder)) == 1
    harness.does(harness.policy.executor_lost("killed", harness.now))
    assert harness.failed() == [([2], "executor_failed", "images[0]")]
    (three,) = harness.take(Encode)
    harness.hear(Patched(three.number, TIMES))
    assert harness.take(RunVisionEncoder) == []
    harness.does(harness.policy.executor_ready(ready(LIMITS, 2), harness.now))
    assert [one.number for one in harness.take(RunVisionEncoder)] == [three.number]


def test_patches_that_nobody_waits_for_are_let_go_before_the_tower_has_them() -> None:
    harness = Harness()
    harness.does(harness.policy.executor_lost("killed", harness.now))
    harness.submit(submit_images(1, "cat"))
    (cat,) = harness.take(Encode)
    harness.hear(Patched(cat.number, TIMES))
    harness.cancel(1)
    harness.does(harness.policy.executor_ready(ready(LIMITS, 2), harness.now))
    assert harness.take(RunVisionEncoder) == []
    harness.submit(submit_images(2, "cat"))
    assert harness.senders() == [2]


SIZE_BYTES = 1000
ENCODE_TIMES = ImageTimes(0.1, 0.2, 0.3)
A, B, C, D = b"a", b"b", b"c", b"d"


class Store(StoredEmbeddings):
    """With room for so many embeddings of `SIZE_BYTES`, and what requests have pinned."""

    def __init__(self, rooms: int = 3) -> None:
        super().__init__(ArenaSlots(rooms * slot_bytes(SIZE_BYTES)))
        self.pinned: dict[int, list[StoredEmbedding]] = {}

    def ask(self, rid: int, wanted: dict[bytes, int]) -> bool:
        found = self.pin(wanted)
        if found is not None:
            assert [one.key for one in found] == list(wanted)
            self.pinned[rid] = found
        return found is not None

    def end(self, rid: int) -> None:
        self.release(self.pinned.pop(rid))


def pin(made: Store, rid: int, *keys: bytes) -> bool:
    return made.ask(rid, dict.fromkeys(keys, SIZE_BYTES))


def make(made: StoredEmbeddings, *keys: bytes) -> None:
    for key in keys:
        made.begin(key)
        made.finish(key, ENCODE_TIMES)


def test_what_was_made_is_there_for_the_next_who_asks() -> None:
    made = Store()
    assert pin(made, 1, A)
    assert made.state(A) is SlotState.EMPTY
    slot = made.begin(A)
    assert made.state(A) is SlotState.BUSY
    made.finish(A, ENCODE_TIMES)
    made.end(1)
    assert pin(made, 2, A)
    assert (made.state(A), made.slot(A), made.times(A)) == (SlotState.READY, slot, ENCODE_TIMES)


def test_the_least_recently_used_goes_first_and_nothing_that_is_pinned() -> None:
    made = Store()
    assert pin(made, 1, A, B, C)
    make(made, A, B, C)
    made.end(1)
    assert pin(made, 2, A)
    made.end(2)
    assert pin(made, 3, C)
    assert pin(made, 4, D)
    assert B not in made
    assert pin(made, 5, B)
    assert A not in made
    assert not pin(made, 6, A)
    assert {C, D, B} == {key for key in (A, B, C, D) if key in made}


def test_a_request_without_room_pins_nothing_and_costs_nobody_anything() -> None:
    made = Store()
    assert pin(made, 1, A, B)
    make(made, A, B)
    made.end(1)
    assert pin(made, 2, C)
    assert not pin(made, 3, B, D, b"e")
    assert A in made
    assert B in made
    assert list(made.pinned) == [2]
    assert pin(made, 4, D, b"e")
    assert {A, B} & {key for key in (A, B) if key in made} == set()


def test_what_nobody_has_begun_goes_with_its_last_request() -> None:
    made = Store()
    assert pin(made, 1, A)
    assert pin(made, 2, A)
    made.end(1)
    assert A in made
    made.end(2)
    assert A not in made
    assert made.used == 0


def test_what_is_being_written_stays_until_the_writer_has_answered() -> None:
    made = Store(1)
    assert pin(made, 1, A)
    slot = made.begin(A)
    made.end(1)
    assert not pin(made, 2, B)
    made.fail(A)
    assert A not in made
    assert pin(made, 2, B)
    assert made.slot(B).offset == slot.offset
    made.begin(B)
    made.end(2)
    made.finish(B, ENCODE_TIMES)
    assert pin(made, 3, B)


def test_what_a_dead_writer_had_is_not_given_to_others_before_it_is_freed() -> None:
    made = Store(1)
    assert pin(made, 1, A)
    made.begin(A)
    slot = made.abandon(A)
    assert not pin(made, 2, A)
    made.free(slot)
    assert pin(made, 2, A)
    # What the first had was another one of the same image.
    made.end(1)
    assert made.is_named(A)
    assert made.state(A) is SlotState.EMPTY


def test_one_key_twice_in_a_request_is_pinned_once() -> None:
    made = Store(1)
    assert made.holds({A: SIZE_BYTES})
    assert not made.holds({A: SIZE_BYTES, B: SIZE_BYTES})
    assert pin(made, 1, A, A)
    make(made, A)
    made.end(1)
    assert pin(made, 2, B)


def test_nothing_leaks_whatever_happens() -> None:
    chance = random.Random(3)
    made, busy, forsaken = Store(5), set[bytes](), []
    for rid in range(3000):
        match chance.randrange(5):
            case 0 | 1:
                keys = chance.sample([A, B, C, D, b"e", b"f", b"g"], 2)
                made.ask(rid, {key: chance.randrange(2 * SIZE_BYTES) for key in keys})
            case 2 if made.pinned:
                made.end(chance.choice(list(made.pinned)))
            case 3:
                busy |= begun(made)
            case 4 if busy:
                key = busy.pop()
                end = chance.choice((made.fail, lambda one: made.finish(one, ENCODE_TIMES), None))
                forsaken += [] if end else [made.abandon(key)]
                (end or len)(key)
    for key in busy:
        made.fail(key)
    for slot in forsaken:
        made.free(slot)
    for rid in list(made.pinned):
        made.end(rid)
    assert made.pin({b"all": 5 * slot_bytes(SIZE_BYTES) - slot_bytes(0)})
    assert len(made) == 1


def begun(made: StoredEmbeddings) -> set[bytes]:
    """Begin what is empty."""
    empty = {k for k in (A, B, C, D) if k in made and made.state(k) is SlotState.EMPTY}
    for key in empty:
        made.begin(key)
    return empty
