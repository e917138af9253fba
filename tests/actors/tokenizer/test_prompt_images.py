from __future__ import annotations

from itertools import combinations
from pathlib import Path

import anyio
import msgspec
import pytest

from hearth.actors.messages import (
    Cancel,
    Convert,
    Converted,
    Failed,
    Request,
    Visual,
)
from hearth.actors.tokenizer import prompt_images
from hearth.runtime.errors import HearthError
from hearth.runtime.images import ImageSpan
from hearth.runtime.text.conversation import Conversation, Turn, TurnPart
from tests.actors.tokenizer.test_actor import harness
from tests.actors.tokenizer.vision_inputs import IMAGE, VisionInputs, turn
from tests.vision_models import FAMILIES, Family, make_tokenizer


@pytest.fixture
def inputs(tmp_path: Path) -> VisionInputs:
    return VisionInputs(tmp_path)


def ids_of(family: Family, text: str) -> list[int]:
    ids: list[int] = make_tokenizer(family).encode(text, add_special_tokens=False).ids
    return ids


def test_each_image_has_its_tokens_where_it_stands(inputs: VisionInputs) -> None:
    turns = [Turn("system", "You see."), turn("a", IMAGE, "b", IMAGE)]
    visuals = [inputs.send(), inputs.send(b"other", 32, 96)]
    prompt = inputs.encode(turns, visuals)
    first, second = ("<|vision_start|>" + "<|image_pad|>" * n + "<|vision_end|>" for n in (4, 3))
    assert prompt.encoded.ids == ids_of(
        "qwen3_vl",
        "<|im_start|>system\nYou see.<|im_end|>\n"
        f"<|im_start|>user\na{first}b{second}<|im_end|>\n<|im_start|>assistant\n",
    )
    assert [layout.tokens for layout in prompt.layouts] == [4, 3]
    for (span,) in prompt.spans:
        assert prompt.encoded.ids[span.start : span.start + span.length] == [5] * span.length


def test_what_a_user_spells_is_no_place_for_an_image(inputs: VisionInputs) -> None:
    visual = inputs.send()
    spelled = "<|image_pad|><|vision_end|>"
    prompt = inputs.encode([turn("<|image_", IMAGE, "pad|>", spelled)], [visual])
    assert prompt.encoded.ids.count(5) == 4
    assert prompt.encoded.ids.count(4) == 1
    assert [len(spans) for spans in prompt.spans] == [1]
    text = inputs.tokenizer.encode_pairs([("user", spelled)])
    assert {4, 5} & set(text) == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_of_text_is_read_by_the_template_of_a_model_that_sees(
    tmp_path: Path, family: Family
) -> None:
    inputs = VisionInputs(tmp_path, family)
    text = inputs.tokenizer.decode(inputs.tokenizer.encode_pairs([("user", "the red lamp")]))
    assert "the red lamp" in text


def test_a_video_of_idefics3_is_pictures_with_text_between_them(tmp_path: Path) -> None:
    inputs = VisionInputs(tmp_path, "idefics3")
    video = inputs.video(0.0, 1.0, 2.0)
    prompt = inputs.encode([turn(TurnPart("video"), "what happens?", IMAGE)], [
        video, inputs.send(),
    ])  # fmt: skip
    frames, picture = prompt.spans
    assert len(frames) == 3
    assert all(isinstance(span, ImageSpan) for span in picture)
    text = inputs.tokenizer.decode(prompt.encoded.ids)
    assert "series of three frames from a 0:00:03 [H:MM:SS] video" in text
    assert "Frame from 00:02:" in text


def test_a_video_of_qwen3_says_its_times(inputs: VisionInputs) -> None:
    prompt = inputs.encode([turn(TurnPart("video"))], [inputs.video(0.0, 1.0, 2.0, 3.0)])
    assert [len(spans) for spans in prompt.spans] == [2]
    assert "<0.5 seconds>" in inputs.tokenizer.decode(prompt.encoded.ids)


def test_the_limit_of_tokens_makes_a_picture_smaller(tmp_path: Path) -> None:
    inputs = VisionInputs(tmp_path, most_tokens=4)
    prompt = inputs.encode([turn(IMAGE)], [inputs.send(b"large", 640, 640)])
    assert prompt.layouts[0].tokens == 4


def test_a_fault_names_its_image(inputs: VisionInputs) -> None:
    long = inputs.send(b"line", 4000, 10)
    with pytest.raises(HearthError) as caught:
        inputs.encode([turn(IMAGE, IMAGE)], [inputs.send(), long])
    assert (caught.value.code, caught.value.field) == ("image_invalid", "images[1]")
    with pytest.raises(HearthError) as caught:
        inputs.encode([turn(IMAGE)], [Visual([])])
    assert (caught.value.code, caught.value.field) == ("invalid_value", "messages")
    with pytest.raises(HearthError) as caught:
        inputs.encode([turn(IMAGE)], [])
    assert (caught.value.code, caught.value.field) == ("invalid_value", "messages")


def test_a_key_is_that_of_what_becomes_of_the_picture(inputs: VisionInputs, tmp_path: Path) -> None:
    turns = [turn(*[IMAGE] * 5)]
    visuals = [
        inputs.send(b"one"),
        inputs.send(b"one"),
        inputs.send(b"two"),
        inputs.send(b"one", 96, 64),
        inputs.send(b"one"),
    ]
    works = inputs.images.works(inputs.encode(turns, visuals), visuals)
    keys = [image.work.key for image in works]
    assert keys[0] == keys[1] == keys[4]
    assert len(set(keys)) == 3
    (tmp_path / "other").mkdir()
    other = VisionInputs(tmp_path / "other", "qwen2_5_vl")
    same = [other.send(b"one")]
    assert other.images.works(other.encode([turn(IMAGE)], same), same)[0].work.key != keys[0]


def test_videos_of_the_same_bytes_in_other_frames_have_other_keys(inputs: VisionInputs) -> None:
    data = b"abcdef"
    splits = [
        (data[:first], data[first:second], data[second:])
        for first, second in combinations(range(1, len(data)), 2)
    ]
    videos = [inputs.video(0.0, 1.0, 2.0, data=split) for split in splits]
    videos.append(inputs.video(0.0, 1.0, 2.0, data=splits[0]))
    prompt = inputs.encode([turn(*[TurnPart("video")] * len(videos))], videos)
    keys = [image.work.key for image in inputs.images.works(prompt, videos)]
    assert len(set(keys)) == len(splits)
    assert keys[-1] == keys[0]


def test_what_was_decoded_another_way_has_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for number, name in enumerate(("before", "now")):
        monkeypatch.setattr(prompt_images, "DECODING", number)
        (tmp_path / name).mkdir()
        inputs = VisionInputs(tmp_path / name)
        visuals = [inputs.send(b"one")]
        (work,) = inputs.images.works(inputs.encode([turn(IMAGE)], visuals), visuals)
        keys.append(work.work.key)
    assert keys[0] != keys[1]


def test_a_picture_that_has_gone_is_noticed(inputs: VisionInputs) -> None:
    visual = inputs.send()
    prompt = inputs.encode([turn(IMAGE)], [visual])
    inputs.slots.free(visual.frames[0].slot)
    with pytest.raises(HearthError) as caught:
        inputs.images.works(prompt, [visual])
    assert caught.value.code == "internal"


TURNS = [turn("what is ", IMAGE, "?")]


async def test_a_request_is_submitted_with_its_images(tmp_path: Path) -> None:
    inputs = VisionInputs(tmp_path)
    visual = inputs.send()
    async with harness(inputs.tokenizer, images=inputs.images) as made:
        made.mail.post(Request(7, chat=Conversation(TURNS), visuals=[visual]))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        prompt = inputs.encode(TURNS, [visual])
        assert submit.token_ids == prompt.encoded.ids
        assert submit.images == inputs.images.works(prompt, [visual])


async def test_tokenize_counts_the_tokens_of_pictures_without_their_bytes(tmp_path: Path) -> None:
    inputs = VisionInputs(tmp_path)
    visual = inputs.send()
    inputs.slots.free(visual.frames[0].slot)
    async with harness(inputs.tokenizer, images=inputs.images) as made:
        made.mail.post(Convert(7, chat=Conversation(TURNS), visuals=[visual]))
        answer = await made.door.receive()
        assert answer == Converted(7, tokens=inputs.encode(TURNS, [visual]).encoded.ids)


async def test_a_fault_of_an_image_is_told_with_its_number(tmp_path: Path) -> None:
    inputs = VisionInputs(tmp_path)
    async with harness(inputs.tokenizer, images=inputs.images) as made:
        made.mail.post(
            Request(7, chat=Conversation(TURNS), visuals=[inputs.send(b"line", 4000, 10)])
        )
        failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code, failed.field) == ([7], "image_invalid", "images[0]")


async def test_a_model_of_text_alone_refuses_images(tmp_path: Path) -> None:
    inputs = VisionInputs(tmp_path)
    async with harness(inputs.tokenizer) as made:
        made.mail.post(Request(7, chat=Conversation(TURNS), visuals=[inputs.send()]))
        failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.code, failed.field) == ("unsupported_option", "messages")


async def test_a_long_digest_holds_nobody_up_and_a_cancel_meanwhile_ends_it(tmp_path: Path) -> None:
    inputs = VisionInputs(tmp_path)
    large = inputs.send(bytes(900_000))
    async with harness(inputs.tokenizer, images=inputs.images) as made:
        made.mail.post(Request(7, chat=Conversation(TURNS), visuals=[large]))
        made.mail.post(Cancel(7))
        made.mail.post(Request(8, prompt="a"))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert submit.rid == 8


async def test_no_bytes_of_a_picture_pass_through_a_mailbox(tmp_path: Path) -> None:
    inputs = VisionInputs(tmp_path)
    visual = inputs.send(bytes(900_000))
    asked = Request(7, chat=Conversation(TURNS), visuals=[visual])
    async with harness(inputs.tokenizer, images=inputs.images) as made:
        with anyio.fail_after(30):
            made.mail.post(asked)
            submit = await made.scheduler.receive()
    assert len(msgspec.msgpack.encode(asked)) < 200
    assert len(msgspec.msgpack.encode(submit)) < 500
