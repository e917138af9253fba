from __future__ import annotations

from pathlib import Path

import anyio
import msgspec

from hearth.actors.messages import Cancel, Convert, Converted, Failed, Request
from tests.actors.seeing import IMAGE, Eyes, turn
from tests.actors.test_tokenizer import house

TURNS = [turn("what is ", IMAGE, "?")]


async def test_a_request_is_submitted_with_its_images(tmp_path: Path) -> None:
    eyes = Eyes(tmp_path)
    visual = eyes.send()
    async with house(eyes.tokenizer, images=eyes.images) as made:
        made.mail.post(Request(7, turns=TURNS, visuals=[visual]))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        prompt = eyes.images.encode(TURNS, [visual])
        assert submit.token_ids == prompt.ids
        assert submit.images == eyes.images.works(prompt, [visual])


async def test_tokenize_counts_the_tokens_of_pictures_without_their_bytes(tmp_path: Path) -> None:
    eyes = Eyes(tmp_path)
    visual = eyes.send()
    eyes.slots.free(visual.frames[0].slot)
    async with house(eyes.tokenizer, images=eyes.images) as made:
        made.mail.post(Convert(7, turns=TURNS, visuals=[visual]))
        answer = await made.door.receive()
        assert answer == Converted(7, tokens=eyes.images.encode(TURNS, [visual]).ids)


async def test_a_fault_of_an_image_is_told_with_its_number(tmp_path: Path) -> None:
    eyes = Eyes(tmp_path)
    async with house(eyes.tokenizer, images=eyes.images) as made:
        made.mail.post(Request(7, turns=TURNS, visuals=[eyes.send(b"line", 4000, 10)]))
        failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code, failed.field) == ([7], "image_invalid", "images[0]")


async def test_a_model_of_text_alone_refuses_images(tmp_path: Path) -> None:
    eyes = Eyes(tmp_path)
    async with house(eyes.tokenizer) as made:
        made.mail.post(Request(7, turns=TURNS, visuals=[eyes.send()]))
        failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.code, failed.field) == ("unsupported_option", "messages")


async def test_a_long_digest_holds_nobody_up_and_a_cancel_meanwhile_ends_it(tmp_path: Path) -> None:
    eyes = Eyes(tmp_path)
    large = eyes.send(bytes(900_000))
    async with house(eyes.tokenizer, images=eyes.images) as made:
        made.mail.post(Request(7, turns=TURNS, visuals=[large]))
        made.mail.post(Cancel(7))
        made.mail.post(Request(8, prompt="a"))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert submit.rid == 8


async def test_no_bytes_of_a_picture_pass_through_a_mailbox(tmp_path: Path) -> None:
    eyes = Eyes(tmp_path)
    visual = eyes.send(bytes(900_000))
    asked = Request(7, turns=TURNS, visuals=[visual])
    async with house(eyes.tokenizer, images=eyes.images) as made:
        with anyio.fail_after(30):
            made.mail.post(asked)
            submit = await made.scheduler.receive()
    assert len(msgspec.msgpack.encode(asked)) < 200
    assert len(msgspec.msgpack.encode(submit)) < 500
