from __future__ import annotations

from hearth.actors.arena import slot_bytes
from hearth.actors.messages import (
    Accepted,
    DropWork,
    Embedded,
    Encode,
    EncodeFailed,
    EncoderLost,
    EncoderReady,
    Failed,
    ImageTimes,
)
from hearth.actors.scheduler.encoder_scheduler import IN_FLIGHT
from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.runtime.images import ImageLayout
from tests.actors.encoding_house import LIMITS, SETTINGS, House
from tests.actors.image_requests import SIZE, TOKEN_BYTES, TOKENS, arenas, submit_images
from tests.actors.simulation import ready, submit


def test_a_row_is_offered_once_all_of_its_embeddings_are_there() -> None:
    house = House()
    house.submit(submit_images(1, "cat", "dog"))
    assert house.take(Accepted) == [Accepted(1, 11)]
    cat, dog = house.take(Encode)
    assert cat.patches != dog.patches
    house.encode(dog.number)
    assert house.offered() == {}
    house.encode(cat.number)
    (told,) = house.take(Embedded)
    assert told == Embedded(1, 2 * TOKENS, 0, ImageTimes(0.2, 0.4, 0.8), [SIZE] * 2)
    first, second = house.offered()[1].images
    assert (first.slot, second.slot) == (cat.target, dog.target)
    assert [one.start for one in (*first.spans, *second.spans)] == [1, 6]


def test_text_goes_on_while_images_are_encoded() -> None:
    house = House()
    house.submit(submit_images(1, "cat"), submit(2))
    assert list(house.offered()) == [2]


def test_what_is_there_already_is_not_encoded_again() -> None:
    house = House()
    house.submit(submit_images(1, "cat"))
    house.encode(house.take(Encode)[0].number)
    house.end(1)
    house.take(Embedded)
    house.offered()
    house.submit(submit_images(2, "cat", "cat"))
    assert house.take(Encode) == []
    assert house.take(Embedded) == [Embedded(2, 2 * TOKENS, 2, ImageTimes(), [SIZE] * 2)]
    assert list(house.offered()) == [2]


def test_two_requests_with_one_picture_wait_for_one_piece_of_work() -> None:
    house = House()
    house.submit(submit_images(1, "cat"), submit_images(2, "cat"))
    (one,) = house.take(Encode)
    house.encode(one.number)
    assert [told.rid for told in house.take(Embedded)] == [1, 2]
    assert set(house.offered()) == {1, 2}


def test_work_is_sent_in_the_order_of_the_queue_and_by_turns_of_clients() -> None:
    house = House(encoder=False)
    for rid in range(1, 20):
        house.submit(submit_images(rid, str(rid), client=1))
    house.submit(submit_images(20, "other", client=2))
    house.submit(submit_images(21, "urgent", client=1, priority=5))
    house.hear(EncoderReady("w"))
    assert house.senders() == [21, 20, 1, 2, 3, 4, 5, 6][:IN_FLIGHT]
    house.submit(submit_images(22, "late", client=3))
    house.encode(1)
    assert house.senders() == [22]


def test_work_waits_for_room_in_the_arena_of_patches() -> None:
    house = House(arenas(patches=2))
    house.submit(*(submit_images(rid, str(rid)) for rid in (1, 2, 3)))
    first, second = house.take(Encode)
    house.encode(first.number)
    (third,) = house.take(Encode)
    assert third.patches.offset == first.patches.offset
    assert third.number not in {first.number, second.number}


def test_what_fits_never_is_too_large_and_what_does_not_fit_now_is_refused_for_now() -> None:
    house = House(arenas(patches=2, embeddings=2))
    house.submit(submit_images(1, "a", "b", "c"))
    assert house.failed() == [([1], "image_too_large", "image_cache_bytes")]
    house.submit(submit_images(2, "a", layout=ImageLayout(64, 64, (1, 20, 20), TOKENS)))
    assert house.failed() == [([2], "image_too_large", "images[0]")]
    house.submit(submit_images(3, "a"), submit_images(4, "b", "c"))
    assert house.failed() == [([4], "queue_full", "image_cache_bytes")]
    house.submit(submit_images(5, "a", "b"))
    assert house.failed() == []
    house.cancel(5)
    house.submit(submit_images(6, "c"))
    assert house.failed() == [([6], "queue_full", "image_cache_bytes")]
    (_, b) = house.take(Encode)
    house.hear(EncodeFailed(b.number, "cancelled", "dropped"))
    house.submit(submit_images(7, "c"))
    assert house.failed() == []


def test_a_client_leaves_room_for_the_images_of_others() -> None:
    house = House(arenas(embeddings=8))
    names = [str(number) for number in range(12)]
    for rid, name in enumerate(names[:8], 1):
        house.submit(submit_images(rid, name, client=7))
    assert house.failed() == [
        ([7], "too_many_requests", "client_queue_share"),
        ([8], "too_many_requests", "client_queue_share"),
    ]
    house.submit(submit_images(9, "of another", client=8))
    assert house.failed() == []
    house.cancel(1)
    house.submit(submit_images(10, "0", client=8))
    assert house.failed() == []


def test_an_image_without_a_size_is_refused() -> None:
    house = House()
    house.submit(submit_images(1, "a", layout=ImageLayout(0, 0, (0, 0, 0), 0)))
    assert house.failed() == [([1], "image_invalid", "images[0]")]


def test_a_text_model_refuses_images() -> None:
    policy = SchedulerPolicy(SETTINGS)
    (failed,) = policy.submit(submit_images(1, "cat"), 0.0)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.field) == ("unsupported_option", "messages")


def test_a_failure_is_that_of_all_who_wait_for_the_picture_and_of_nobody_else() -> None:
    house = House()
    house.submit(submit_images(1, "dog", "bad"), submit_images(2, "bad"), submit_images(3, "dog"))
    dog, bad = house.take(Encode)
    house.hear(EncodeFailed(bad.number, "image_invalid", "it is no picture"))
    assert house.failed() == [
        ([1], "image_invalid", "images[1]"),
        ([2], "image_invalid", "images[0]"),
    ]
    house.encode(dog.number)
    assert list(house.offered()) == [3]


def test_work_whose_sender_has_gone_is_tried_again_for_who_still_waits() -> None:
    house = House()
    house.submit(*(submit_images(rid, "cat") for rid in (1, 2, 3)))
    assert house.senders() == [1]
    house.cancel(1)
    house.hear(EncodeFailed(1, "image_invalid", "it is no picture"))
    assert house.failed() == []
    assert house.senders() == [2]
    # Its sender has ended for the front door, and the word of that is still on its way.
    house.hear(EncodeFailed(2, "internal", "a piece of shared memory has been given to another"))
    assert house.failed() == [([2], "internal", "images[0]")]
    assert house.senders() == [3]


def test_a_cancel_reaches_the_encoder_once_nobody_waits() -> None:
    house = House()
    house.submit(submit_images(1, "cat"), submit_images(2, "cat"))
    (one,) = house.take(Encode)
    house.cancel(1)
    house.cancel(2)
    assert house.take(DropWork) == [DropWork([one.number])]
    house.cancel(2)
    assert house.take(DropWork) == []
    house.submit(submit_images(3, "cat"))
    assert house.take(Encode) == []
    house.hear(EncodeFailed(one.number, "cancelled", "nobody waits for it any more"))
    assert house.senders() == [3]


def test_a_deadline_ends_a_request_that_waits_for_embeddings() -> None:
    house = House()
    house.submit(submit_images(1, "cat", deadline=1.0))
    assert house.policy.next_wake() == 1.0
    house.now = 1.0
    house.does([])
    assert house.failed() == [([1], "deadline_exceeded", "deadline_s")]
    assert len(house.take(DropWork)) == 1


def test_a_crash_of_the_encoder_ends_what_it_had_and_nothing_else() -> None:
    house = House(arenas(patches=1, embeddings=2))
    house.submit(submit_images(1, "cat"), submit_images(2, "dog"), submit(3))
    (cat,) = house.take(Encode)
    house.hear(EncoderLost("it was ended by SIGKILL"))
    assert house.failed() == [([1], "encoder_failed", "images[0]")]
    assert house.take(Encode) == []
    house.submit(submit_images(4, "cat"))
    # The dead one may still write to what it had: nobody gets that yet.
    assert house.failed() == [([4], "queue_full", "image_cache_bytes")]
    house.encode(cat.number)
    house.hear(EncoderReady("w"))
    assert house.senders() == [2]
    house.submit(submit_images(5, "cat"))
    assert house.failed() == []
    assert list(house.offered()) == [3]


def test_a_picture_that_kills_each_encoder_is_sent_alone_and_then_refused() -> None:
    house = House()
    house.submit(submit_images(1, "poison"), submit_images(2, "dog"))
    assert house.senders() == [1, 2]
    house.hear(EncoderLost("killed"))
    assert len(house.failed()) == 2
    house.hear(EncoderReady("w"))
    house.submit(submit_images(3, "cat"), submit_images(4, "poison"), submit_images(5, "dog"))
    assert house.senders() == [3]
    house.encode(3)
    assert house.senders() == [4]
    house.hear(EncoderLost("killed"))
    assert house.failed() == [([4], "encoder_failed", "images[0]")]
    house.hear(EncoderReady("w"))
    assert house.senders() == [5]
    house.submit(submit_images(6, "poison"))
    assert house.failed() == [([6], "repeated_failure", None)]
    house.encode(5)
    house.submit(submit_images(7, "owl"), submit_images(8, "elk"))
    assert house.senders() == [7, 8]


def test_a_row_that_was_put_back_finds_its_embeddings_still_there() -> None:
    house = House(arenas(embeddings=1))
    house.submit(submit_images(1, "cat"))
    house.encode(house.take(Encode)[0].number)
    images = house.offered()[1].images
    house.tell(placed=[1])
    house.tell(preempted={1: [7]})
    row = house.offered()[1]
    assert (row.images, row.token_ids[-1], row.prompt_length) == (images, 7, 6)
    house.submit(submit_images(2, "dog"))
    assert house.failed() == [([2], "queue_full", "image_cache_bytes")]


def test_embeddings_outlive_an_executor_and_those_who_had_not_begun_are_offered_again() -> None:
    house = House()
    house.submit(submit_images(1, "cat"))
    house.encode(house.take(Encode)[0].number)
    images = house.offered()[1].images
    house.does(house.policy.executor_lost("killed", house.now))
    house.does(house.policy.executor_ready(ready(LIMITS, 2), house.now))
    assert house.offered()[1].images == images
    assert house.take(Encode) == []


def test_embeddings_stay_while_the_executor_has_not_said_that_a_cancelled_row_left() -> None:
    house = House(arenas(embeddings=1))
    house.submit(submit_images(1, "cat"))
    house.encode(house.take(Encode)[0].number)
    house.tell(placed=[1])
    house.cancel(1)
    house.submit(submit_images(2, "dog"))
    assert house.failed() == [([2], "queue_full", "image_cache_bytes")]
    house.end(1)
    house.submit(submit_images(3, "dog"))
    assert house.failed() == []


def test_images_count_among_those_that_wait() -> None:
    house = House()
    house.submit(submit_images(1, "cat"))
    report = house.policy.report(0)
    assert (report.queued, report.queued_tokens) == (1, 6)
    assert report.embeddings == slot_bytes(TOKENS * TOKEN_BYTES)
    assert SchedulerPolicy(SETTINGS).report(0).embeddings is None
