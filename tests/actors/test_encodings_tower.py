from __future__ import annotations

from hearth.actors.messages import (
    Embedded,
    Encode,
    Encoded,
    EncodeFailed,
    ImageTimes,
    Patched,
    RunVisionEncoder,
)
from tests.actors.encoding_house import LIMITS, TIMES, House
from tests.actors.image_requests import arenas, submit_images
from tests.actors.simulation import ready


def test_a_picture_that_kills_each_executor_is_refused_as_well() -> None:
    house = House()
    for rid in (1, 2):
        house.submit(submit_images(rid, "poison"))
        house.hear(Patched(rid, TIMES))
        assert len(house.take(RunVisionEncoder)) == 1
        house.does(house.policy.executor_lost("killed", house.now))
        assert house.failed() == [([rid], "executor_failed", "images[0]")]
        house.does(house.policy.executor_ready(ready(LIMITS, 1 + rid), house.now))
    house.submit(submit_images(3, "poison"))
    assert house.failed() == [([3], "repeated_failure", None)]


def test_on_a_gpu_the_executor_runs_the_tower() -> None:
    house = House()
    house.submit(submit_images(1, "cat"))
    (cat,) = house.take(Encode)
    house.hear(Patched(cat.number, ImageTimes(0.1, 0.2)))
    (run,) = house.take(RunVisionEncoder)
    assert (run.patches, run.target, run.layout) == (cat.patches, cat.target, cat.work.layout)
    house.tell(images=[Encoded(run.number, ImageTimes(engine_s=0.4))])
    assert house.take(Embedded)[0].times == TIMES
    assert list(house.offered()) == [1]


def test_a_tower_that_fails_or_dies_ends_what_it_had() -> None:
    house = House(arenas(patches=2))
    house.submit(*(submit_images(rid, str(rid)) for rid in (1, 2, 3)))
    one, two = house.take(Encode)
    house.hear(Patched(one.number, TIMES))
    assert len(house.take(RunVisionEncoder)) == 1
    house.tell(images=[EncodeFailed(one.number, "encoder_failed", "the tower failed")])
    assert house.failed() == [([1], "encoder_failed", "images[0]")]
    house.hear(Patched(two.number, TIMES))
    assert len(house.take(RunVisionEncoder)) == 1
    house.does(house.policy.executor_lost("killed", house.now))
    assert house.failed() == [([2], "executor_failed", "images[0]")]
    (three,) = house.take(Encode)
    house.hear(Patched(three.number, TIMES))
    assert house.take(RunVisionEncoder) == []
    house.does(house.policy.executor_ready(ready(LIMITS, 2), house.now))
    assert [one.number for one in house.take(RunVisionEncoder)] == [three.number]


def test_patches_that_nobody_waits_for_are_let_go_before_the_tower_has_them() -> None:
    house = House()
    house.does(house.policy.executor_lost("killed", house.now))
    house.submit(submit_images(1, "cat"))
    (cat,) = house.take(Encode)
    house.hear(Patched(cat.number, TIMES))
    house.cancel(1)
    house.does(house.policy.executor_ready(ready(LIMITS, 2), house.now))
    assert house.take(RunVisionEncoder) == []
    house.submit(submit_images(2, "cat"))
    assert house.senders() == [2]
