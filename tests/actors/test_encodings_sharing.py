from __future__ import annotations

from tests.actors.encoding_house import House
from tests.actors.image_requests import arenas, submit_images


def test_many_questions_about_one_picture_take_its_memory_once() -> None:
    house = House(arenas(embeddings=8))
    for rid in range(1, 21):
        house.submit(submit_images(rid, "cat", client=7))
    assert house.failed() == []
    for rid in range(21, 28):
        house.submit(submit_images(rid, str(rid), client=7))
    assert house.failed() == [
        ([26], "too_many_requests", "client_queue_share"),
        ([27], "too_many_requests", "client_queue_share"),
    ]
    house.submit(submit_images(28, "cat", client=7), submit_images(29, "cat", client=8))
    assert house.failed() == []
