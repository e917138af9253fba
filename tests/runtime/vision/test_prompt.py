"""Places of images in rows, and their positions against those that transformers counts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.positions import PLAIN, pair_axes, row_positions
from hearth.runtime.image_processing.sizes import layout_of, video_layout
from hearth.runtime.images import EmbeddedImage, ImageLayout, ImageSpan
from hearth.runtime.vision.prompt import expand, video_parts
from hearth.runtime.vision.vision_runner import LocalEmbeddings
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


Block = tuple[int, tuple[int, int, int], float]
"""What stands in a prompt: text (0) of a length, an image (1) or a video (2) of a grid."""
TEXT_ONLY: list[Block] = [(0, (7, 0, 0), 1.0)]
IMAGES: list[Block] = [
    (0, (3, 0, 0), 1.0),
    (1, (1, 2, 5), 1.0),
    (0, (2, 0, 0), 1.0),
    (1, (1, 4, 3), 1.0),
    (0, (6, 0, 0), 1.0),
]
VIDEO: list[Block] = [
    (1, (1, 3, 3), 1.0),
    (0, (4, 0, 0), 1.0),
    (2, (4, 2, 2), 0.35),
    (0, (2, 0, 0), 1.0),
    (2, (3, 1, 2), 2.0),
    (0, (5, 0, 0), 1.0),
]
FRAMES: list[Block] = [
    (0, (5, 0, 0), 1.0),
    *[(2, (1, 2, 3), 1.0), (0, (3, 0, 0), 1.0)] * 3,
    (1, (1, 2, 2), 1.0),
    (0, (1, 0, 0), 1.0),
]


def spans_of(blocks: list[Block], per_second: float) -> tuple[int, list[ImageSpan]]:
    """Length and spans of such a prompt."""
    spans, place = [], 0
    for kind, grid, seconds in blocks:
        length = int(np.prod(grid)) if kind else grid[0]
        if kind:
            interval = per_second * seconds if kind == 2 else 1.0
            spans.append(ImageSpan(place, length, 0, grid, interval))
        place += length
    return place, spans


def reference(module: str, name: str, blocks: list[Block], per_second: float) -> tuple[Any, int]:
    """What `get_rope_index` of a model says of it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    found = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    model = getattr(found, name)
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=per_second)
    place = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    place.get_vision_position_ids = lambda *given, **named: model.get_vision_position_ids(
        place, *given, **named
    )
    kinds = [kind for kind, grid, _ in blocks for _ in range(int(np.prod(grid)) or grid[0])]
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    for kind, (time, height, width), _ in blocks:
        if kind:
            grids[kind].append([time, 2 * height, 2 * width])
    tables = [torch.tensor(grids[kind]) if grids[kind] else None for kind in (1, 2)]
    named: dict[str, Any] = {}
    if per_second:
        named["second_per_grid_ts"] = [seconds for kind, _, seconds in blocks if kind == 2]
    positions, delta = model.get_rope_index(
        place,
        torch.zeros((1, len(kinds)), dtype=torch.long),
        torch.tensor([kinds]),
        *tables,
        **named,
    )
    return positions[:, 0].numpy(), int(delta[0, 0])


@pytest.mark.reference
@pytest.mark.parametrize(
    ("module", "name", "blocks", "per_second"),
    [
        ("qwen2_5_vl", "Qwen2_5_VLModel", IMAGES, 2.0),
        ("qwen2_5_vl", "Qwen2_5_VLModel", VIDEO, 4.0),
        ("qwen2_5_vl", "Qwen2_5_VLModel", VIDEO, 25.0),
        ("qwen3_vl", "Qwen3VLModel", IMAGES, 0.0),
        ("qwen3_vl", "Qwen3VLModel", FRAMES, 0.0),
    ],
)
def test_positions_are_those_of_transformers(
    module: str, name: str, blocks: list[Block], per_second: float
) -> None:
    wanted, delta = reference(module, name, blocks, per_second)
    found = row_positions(*spans_of(blocks, per_second))
    assert found.prompt.tolist() == wanted.tolist()
    # `generate` goes on behind the last position, and no other than the largest but for videos.
    last, length = int(wanted[0, -1]), wanted.shape[1]
    assert found.delta == last + 1 - length
    assert found.delta == delta or last < wanted.max()


def test_an_image_counts_its_grid_and_moves_the_text_behind_it() -> None:
    found = row_positions(9, [ImageSpan(2, 6, 0, (1, 2, 3))])
    assert found.prompt.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert found.delta == -3


def test_text_and_images_that_count_as_text_stand_at_their_slots() -> None:
    assert row_positions(7, []) is PLAIN
    assert row_positions(9, [ImageSpan(2, 6)]) is PLAIN


def test_the_steps_of_a_video_in_time_are_cut_to_whole_numbers() -> None:
    found = row_positions(4, [ImageSpan(0, 4, 0, (4, 1, 1), 0.7)])
    assert found.prompt[0].tolist() == [0, 0, 1, 2]
    assert found.delta == 1 - 4


def test_pairs_go_by_axes_in_sections_or_in_turn() -> None:
    assert pair_axes((2, 1, 3), interleaved=False).tolist() == [0, 0, 1, 2, 2, 2]
    assert pair_axes((4, 2, 2), interleaved=True).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


@pytest.mark.reference
@pytest.mark.parametrize("sections", [(24, 20, 20), (3, 2, 3), (2, 1, 1)])
def test_interleaved_pairs_are_those_of_transformers(sections: tuple[int, int, int]) -> None:
    torch = pytest.importorskip("torch")
    found = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
    rotary = found.Qwen3VLTextRotaryEmbedding
    values = torch.arange(3).repeat_interleave(sum(sections)).reshape(3, 1, 1, -1).float()
    mixed = rotary.recomposition_frequencies(SimpleNamespace(mrope_section=sections), values)
    axes = pair_axes(sections, interleaved=True)
    assert mixed[0, 0, : len(axes)].tolist() == axes.tolist()


def test_what_is_kept_is_what_was_put() -> None:
    store = LocalEmbeddings()
    first, second = np.zeros((2, 2, 3)), np.ones((2, 3, 3))
    slots = store.put(first), store.put(second)
    assert store.read(EmbeddedImage(slots[1], 3, ())) is second
    assert store.read(EmbeddedImage(slots[0], 2, ())) is first
    with pytest.raises(HearthError):
        store.read(EmbeddedImage(slots[0], 3, ()))
    store.drop(slots[0])
    store.drop(slots[0])
    with pytest.raises(HearthError):
        store.read(EmbeddedImage(slots[0], 2, ()))
