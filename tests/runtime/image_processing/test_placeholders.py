from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.placeholders import expand, video_parts
from hearth.runtime.image_processing.sizes import layout_of, video_layout
from hearth.runtime.images import ImageLayout, ImageSpan
from tests.runtime.image_processing.photographs import config_like, photo
from tests.vision_models import Family, make_tokenizer

SMALL = {"min_pixels": 1, "max_pixels": 16_384, "video_min_pixels": 1, "video_max_pixels": 16_384}
QWEN3, QWEN2_5 = (config_like(name, **SMALL) for name in ("qwen3_vl", "qwen2_5_vl"))
IDEFICS = config_like("idefics3", tile_size=56, longest_edge=224)
TIMES = [0.0, 0.5, 1.0, 1.5, 2.0]


def encoder(family: Family) -> Any:
    tokenizer = make_tokenizer(family)
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def lengths(spans: tuple[ImageSpan, ...]) -> list[tuple[int, int]]:
    return [(span.first, span.length) for span in spans]


def test_a_picture_of_qwen_is_as_many_tokens_as_its_grid_has() -> None:
    layouts = [layout_of(photo(64, 128), QWEN3), layout_of(photo(32, 32), QWEN3)]
    ids, spans = expand([9, 3, 5, 4, 8, 3, 5, 4], layouts, QWEN3, encoder("qwen3_vl"), [[], []])
    assert ids == [9, 3, *[5] * 8, 4, 8, 3, 5, 4]
    assert spans == [(ImageSpan(2, 8, 0, (1, 4, 2)),), (ImageSpan(13, 1, 0, (1, 1, 1)),)]


def test_a_video_of_qwen2_5_has_the_seconds_of_its_steps() -> None:
    layout = video_layout([photo(56, 56)] * 5, TIMES, QWEN2_5)
    ids, spans = expand([3, 6, 4], [layout], QWEN2_5, encoder("qwen2_5_vl"), [TIMES])
    assert ids == [3, *[6] * layout.tokens, 4]
    # Two frames a second, two frames a step, two positions a second.
    assert spans == [(ImageSpan(1, layout.tokens, 0, (3, *side(layout)), 2.0),)]


def side(layout: ImageLayout) -> tuple[int, int]:
    return layout.grid[1] // 2, layout.grid[2] // 2


def test_a_video_of_qwen3_says_when_each_step_was() -> None:
    encode = encoder("qwen3_vl")
    layout = video_layout([photo(64, 64)] * 5, TIMES, QWEN3)
    each = layout.tokens // 3
    ids, spans = expand([3, 6, 4], [layout], QWEN3, encode, [TIMES])
    text = "".join(
        f"<{time} seconds><|vision_start|>{'<|video_pad|>' * each}<|vision_end|>"
        for time in ("0.2", "1.2", "2.0")
    )
    assert ids == [3, *encode(text), 4]
    assert lengths(spans[0]) == [(0, each), (each, each), (2 * each, each)]
    assert {span.grid for span in spans[0]} == {(1, *side(layout))}
    assert all(ids[span.start : span.start + each] == [6] * each for span in spans[0])


def test_tiles_are_told_by_row_and_column() -> None:
    encode = encoder("idefics3")
    layouts = [layout_of(photo(90, 60), IDEFICS), layout_of(photo(90, 60), IDEFICS, 4)]
    assert [(layout.rows, layout.columns) for layout in layouts] == [(3, 4), (0, 0)]
    ids, spans = expand([9, 4, 8, 4], layouts, IDEFICS, encode, [[], []])
    fake, tile = "<fake_token_around_image>", "<image>" * 4
    rows = [
        "".join(f"{fake}<row_{row}_col_{column}>{tile}" for column in range(1, 5)) + "\n"
        for row in range(1, 4)
    ]
    whole = f"{fake}<global-img>{tile}{fake}"
    assert ids == [9, *encode("".join(rows) + "\n" + whole), 8, *encode(whole)]
    assert lengths(spans[0]) == [(4 * number, 4) for number in range(13)]
    assert lengths(spans[1]) == [(0, 4)]
    assert {span.grid for span in spans[0] + spans[1]} == {(0, 0, 0)}


def test_a_video_of_idefics_is_a_message_of_pictures() -> None:
    times = [61.0 + second for second in range(3)]
    layout = video_layout([photo(60, 60)] * 3, times, IDEFICS)
    parts = video_parts(layout, times)
    intro = "You are provided the following series of three frames from a 0:00:03 [H:MM:SS] video."
    assert [part.get("text", part["type"]) for part in parts] == [
        f"{intro}\n\nFrame from 01:01:",
        "image",
        "\nFrame from 01:02:",
        "image",
        "\nFrame from 01:03:",
        "image",
        "\n\n",
    ]
    single = [3, 5, *[4] * 4, 3]
    ids, spans = expand([4, 7, 4, 4], [layout], IDEFICS, encoder("idefics3"), [times])
    assert ids == [*single, 7, *single, *single]
    assert lengths(spans[0]) == [(0, 4), (4, 4), (8, 4)]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "one"), (10, "ten"), (19, "nineteen"), (20, "twenty"), (64, "sixty-four"),
        (100, "one hundred"), (342, "three hundred and forty-two"),
    ],
)  # fmt: skip
def test_the_count_of_frames_is_in_words(number: int, words: str) -> None:
    times = [float(second) for second in range(number)]
    layout = ImageLayout(56, 56, (1, 4, 4), 4 * number, number, frames=tuple(range(number)))
    assert f"series of {words} frames" in video_parts(layout, times)[0]["text"]


@pytest.mark.parametrize(
    "ids",
    [[3, 4], [3, 5, 4], [3, 5, 4, 3, 5, 4, 3, 6, 4], [3, 6, 4, 3, 5, 4], [3, 5, 5, 4], [5, 6, 6]],
)
def test_placeholders_and_images_have_to_match(ids: list[int]) -> None:
    layouts = [layout_of(photo(64, 64), QWEN3), video_layout([photo(64, 64)] * 5, TIMES, QWEN3)]
    with pytest.raises(HearthError) as caught:
        expand(ids, layouts, QWEN3, encoder("qwen3_vl"), [[], TIMES])
    assert (caught.value.code, caught.value.field) == ("invalid_value", "messages")


def test_a_prompt_without_images_stays() -> None:
    assert expand([7, 8], [], QWEN3, encoder("qwen3_vl"), []) == ([7, 8], [])


@pytest.mark.reference
@pytest.mark.parametrize("count", [2, 5, 9])
def test_videos_are_spelled_as_by_qwens_processor(count: int) -> None:
    module = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl")
    frames, rate = list(range(0, count * 7, 7)), 25.0
    layout = video_layout([photo(64, 64)] * count, [f / rate for f in frames], QWEN3)
    names = ("vision_start", "vision_end", "video_pad")
    stub = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        **{f"{name.split('_pad')[0]}_token": f"<|{name}|>" for name in names},
    )
    stub._calculate_timestamps = lambda *given: module.Qwen3VLProcessor._calculate_timestamps(
        stub, *given
    )
    used = [frames[number] for number in layout.frames]
    metadata = SimpleNamespace(fps=rate, frames_indices=used)
    inputs = {"video_grid_thw": np.array([layout.grid]), "video_metadata": [metadata]}
    text = module.Qwen3VLProcessor.replace_video_token(stub, inputs, 0)
    encode = encoder("qwen3_vl")
    ids, _ = expand([3, 6, 4], [layout], QWEN3, encode, [[f / rate for f in frames]])
    assert ids == [3, *encode(text), 4]


@pytest.mark.reference
def test_tiles_and_frames_are_spelled_as_by_smolvlms_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    video_utils = pytest.importorskip("transformers.video_utils")
    monkeypatch.setattr(module, "num2words", {4: "four"}.get)
    names = ("<fake_token_around_image>", "<image>", "<global-img>")
    encode = encoder("idefics3")
    for size in ((90, 60), (60, 300), (20, 20)):
        layout = layout_of(photo(*size), IDEFICS)
        text = module.get_image_prompt_string(layout.rows, layout.columns, 4, *names)
        assert expand([4], [layout], IDEFICS, encode, [[]])[0] == encode(text)
    stub = SimpleNamespace(
        image_seq_len=4,
        fake_image_token=names[0],
        image_token=names[1],
        global_image_token=names[2],
    )
    metadata = video_utils.VideoMetadata(
        total_num_frames=4, fps=0.5, duration=8.0, frames_indices=[0, 1, 2, 3]
    )
    inputs = {"pixel_values": np.zeros((1, 4)), "video_metadata": [metadata]}
    times = [0.0, 2.0, 4.0, 6.0]
    layout = video_layout([photo(60, 60)] * 4, times, IDEFICS)
    parts = video_parts(layout, times)
    rendered = "".join(part.get("text", "<image>") for part in parts)
    ids, _ = expand(encode(rendered), [layout], IDEFICS, encode, [times])
    assert ids == encode(module.SmolVLMProcessor.replace_video_token(stub, inputs, 0))
