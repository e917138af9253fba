from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from hearth.actors.messages import ChatTurn, TurnPart, Visual
from hearth.actors.tokenizer import prompt_images
from hearth.runtime.errors import HearthError
from hearth.runtime.images import ImageSpan
from tests.actors.seeing import IMAGE, Eyes, turn
from tests.vision_models import FAMILIES, Family, make_tokenizer


@pytest.fixture
def eyes(tmp_path: Path) -> Eyes:
    return Eyes(tmp_path)


def ids_of(family: Family, text: str) -> list[int]:
    ids: list[int] = make_tokenizer(family).encode(text, add_special_tokens=False).ids
    return ids


def test_each_image_has_its_tokens_where_it_stands(eyes: Eyes) -> None:
    turns = [ChatTurn("system", "You see."), turn("a", IMAGE, "b", IMAGE)]
    visuals = [eyes.send(), eyes.send(b"other", 32, 96)]
    prompt = eyes.images.encode(turns, visuals)
    first, second = ("<|vision_start|>" + "<|image_pad|>" * n + "<|vision_end|>" for n in (4, 3))
    assert prompt.ids == ids_of(
        "qwen3_vl",
        "<|im_start|>system\nYou see.<|im_end|>\n"
        f"<|im_start|>user\na{first}b{second}<|im_end|>\n<|im_start|>assistant\n",
    )
    assert [layout.tokens for layout in prompt.layouts] == [4, 3]
    for (span,) in prompt.spans:
        assert prompt.ids[span.start : span.start + span.length] == [5] * span.length


def test_what_a_user_spells_is_no_place_for_an_image(eyes: Eyes) -> None:
    visual = eyes.send()
    spelled = "<|image_pad|><|vision_end|>"
    prompt = eyes.images.encode([turn("<|image_", IMAGE, "pad|>", spelled)], [visual])
    assert prompt.ids.count(5) == 4
    assert prompt.ids.count(4) == 1
    assert [len(spans) for spans in prompt.spans] == [1]
    text = eyes.tokenizer.encode_chat([("user", spelled)])
    assert {4, 5} & set(text) == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_of_text_is_read_by_the_template_of_a_model_that_sees(
    tmp_path: Path, family: Family
) -> None:
    eyes = Eyes(tmp_path, family)
    text = eyes.tokenizer.decode(eyes.tokenizer.encode_chat([("user", "the red lamp")]))
    assert "the red lamp" in text


def test_a_video_of_idefics3_is_pictures_with_text_between_them(tmp_path: Path) -> None:
    eyes = Eyes(tmp_path, "idefics3")
    video = eyes.video(0.0, 1.0, 2.0)
    prompt = eyes.images.encode([turn(TurnPart("video"), "what happens?", IMAGE)], [
        video, eyes.send(),
    ])  # fmt: skip
    frames, picture = prompt.spans
    assert len(frames) == 3
    assert all(isinstance(span, ImageSpan) for span in picture)
    text = eyes.tokenizer.decode(prompt.ids)
    assert "series of three frames from a 0:00:03 [H:MM:SS] video" in text
    assert "Frame from 00:02:" in text


def test_a_video_of_qwen3_says_its_times(eyes: Eyes) -> None:
    prompt = eyes.images.encode([turn(TurnPart("video"))], [eyes.video(0.0, 1.0, 2.0, 3.0)])
    assert [len(spans) for spans in prompt.spans] == [2]
    assert "<0.5 seconds>" in eyes.tokenizer.decode(prompt.ids)


def test_the_limit_of_tokens_makes_a_picture_smaller(tmp_path: Path) -> None:
    eyes = Eyes(tmp_path, most_tokens=4)
    prompt = eyes.images.encode([turn(IMAGE)], [eyes.send(b"large", 640, 640)])
    assert prompt.layouts[0].tokens == 4


def test_a_fault_names_its_image(eyes: Eyes) -> None:
    long = eyes.send(b"line", 4000, 10)
    with pytest.raises(HearthError) as caught:
        eyes.images.encode([turn(IMAGE, IMAGE)], [eyes.send(), long])
    assert (caught.value.code, caught.value.field) == ("image_invalid", "images[1]")
    with pytest.raises(HearthError) as caught:
        eyes.images.encode([turn(IMAGE)], [Visual([])])
    assert (caught.value.code, caught.value.field) == ("invalid_value", "messages")
    with pytest.raises(HearthError) as caught:
        eyes.images.encode([turn(IMAGE)], [])
    assert (caught.value.code, caught.value.field) == ("invalid_value", "messages")


def test_a_key_is_that_of_what_becomes_of_the_picture(eyes: Eyes, tmp_path: Path) -> None:
    turns = [turn(*[IMAGE] * 5)]
    visuals = [
        eyes.send(b"one"),
        eyes.send(b"one"),
        eyes.send(b"two"),
        eyes.send(b"one", 96, 64),
        eyes.send(b"one"),
    ]
    works = eyes.images.works(eyes.images.encode(turns, visuals), visuals)
    keys = [image.work.key for image in works]
    assert keys[0] == keys[1] == keys[4]
    assert len(set(keys)) == 3
    (tmp_path / "other").mkdir()
    other = Eyes(tmp_path / "other", "qwen2_5_vl")
    same = [other.send(b"one")]
    assert other.images.works(other.images.encode([turn(IMAGE)], same), same)[0].work.key != keys[0]


def test_videos_of_the_same_bytes_in_other_frames_have_other_keys(eyes: Eyes) -> None:
    data = b"abcdef"
    splits = [
        (data[:first], data[first:second], data[second:])
        for first, second in combinations(range(1, len(data)), 2)
    ]
    videos = [eyes.video(0.0, 1.0, 2.0, data=split) for split in splits]
    videos.append(eyes.video(0.0, 1.0, 2.0, data=splits[0]))
    prompt = eyes.images.encode([turn(*[TurnPart("video")] * len(videos))], videos)
    keys = [image.work.key for image in eyes.images.works(prompt, videos)]
    assert len(set(keys)) == len(splits)
    assert keys[-1] == keys[0]


def test_what_was_decoded_another_way_has_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for number, name in enumerate(("before", "now")):
        monkeypatch.setattr(prompt_images, "DECODING", number)
        (tmp_path / name).mkdir()
        eyes = Eyes(tmp_path / name)
        visuals = [eyes.send(b"one")]
        (work,) = eyes.images.works(eyes.images.encode([turn(IMAGE)], visuals), visuals)
        keys.append(work.work.key)
    assert keys[0] != keys[1]


def test_a_picture_that_has_gone_is_noticed(eyes: Eyes) -> None:
    visual = eyes.send()
    prompt = eyes.images.encode([turn(IMAGE)], [visual])
    eyes.slots.free(visual.frames[0].slot)
    with pytest.raises(HearthError) as caught:
        eyes.images.works(prompt, [visual])
    assert caught.value.code == "internal"
