import random
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.decoding import _resized, patch
from hearth.runtime.image_processing.sizes import (
    first_size,
    largest_square,
    layout_of,
    video_layout,
)
from hearth.runtime.images import ImageLayout
from hearth.runtime.vision_config import VisionConfig
from tests.runtime.image_processing.photographs import config_like, draw, file_of, photo

QWEN3, QWEN2_5, IDEFICS = (config_like(name) for name in ("qwen3_vl", "qwen2_5_vl", "idefics3"))
ALL = (QWEN3, QWEN2_5, IDEFICS)
SIZES = [(1, 1), (1, 200), (200, 1), (28, 28), (224, 224), (640, 480), (1080, 1920), (4000, 3000)]


def refusal(*arguments: Any) -> str:
    with pytest.raises(HearthError) as caught:
        layout_of(*arguments)
    return caught.value.code


def test_known_layouts() -> None:
    assert layout_of(photo(640, 480), QWEN3) == ImageLayout(480, 640, (1, 30, 40), 300)
    assert layout_of(photo(640, 480), QWEN2_5) == ImageLayout(476, 644, (1, 34, 46), 391)
    tiled = ImageLayout(1092, 1456, (1, 26, 26), 13 * 169, 13, 3, 4)
    assert layout_of(photo(640, 480), IDEFICS) == tiled
    assert tiled.patches == 13 * 26 * 26


def test_a_model_that_does_not_split_takes_one_tile() -> None:
    config = config_like("idefics3", splits=False)
    assert layout_of(photo(640, 480), config) == ImageLayout(364, 364, (1, 26, 26), 169)
    assert layout_of(photo(20, 9), config_like("idefics3", longest_edge=300)) == ImageLayout(
        364, 364, (1, 26, 26), 169
    )


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.family)
def test_what_is_too_long_and_narrow_is_refused(config: Any) -> None:
    assert refusal(photo(1, 10_000), config) == "image_invalid"
    assert refusal(photo(10_000, 1), config) == "image_invalid"
    assert layout_of(photo(2000, 10), config).tokens


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.family)
def test_a_limit_is_kept_by_every_picture(config: Any) -> None:
    numbers = random.Random(5)
    least = 169 if config is IDEFICS else 1
    for _ in range(500):
        width = numbers.randrange(1, 3000)
        height = numbers.randrange(max(1, width // 200 + 1), min(3000, width * 200))
        most = numbers.randrange(least, 3000)
        full = layout_of(photo(width, height), config)
        layout = layout_of(photo(width, height), config, most)
        assert 0 < layout.tokens <= most
        assert layout.patches == layout.tokens * 4
        if full.tokens <= most:
            assert layout == full
        elif config is not IDEFICS and width < height * 20 and height < width * 20:
            # A row and a column less is what rounding costs.
            rows, columns = (side // 2 for side in layout.grid[1:])
            assert (rows + 1) * (columns + 1) > most


def test_a_limit_too_small_is_said() -> None:
    assert refusal(photo(640, 480), IDEFICS, 168) == "image_too_large"


def test_a_picture_never_outgrows_the_tower() -> None:
    config = config_like("qwen3_vl")
    small = type(config)(**{name: getattr(config, name) for name in config.__struct_fields__}
                         | {"max_patches": 400})  # fmt: skip
    assert layout_of(photo(1920, 1080), small).patches <= 400


def test_the_frames_of_a_video_count_together_or_one_by_one() -> None:
    frames = [photo(640, 480)] * 5
    times = [0.0, 0.5, 1.0, 1.5, 2.0]
    qwen3 = video_layout(frames, times, QWEN3)
    assert (qwen3.grid[0], qwen3.frames) == (3, (0, 1, 2, 3, 4))
    assert qwen3.height * qwen3.width * 5 <= QWEN3.rules.video_max_pixels
    qwen2_5 = video_layout(frames, times, QWEN2_5)
    assert qwen2_5.grid == (3, 34, 46)
    assert qwen2_5.tokens == 3 * 391
    squares = video_layout(frames, times, IDEFICS)
    assert squares == ImageLayout(364, 364, (1, 26, 26), 845, 5, frames=(0, 1, 2, 3, 4))


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.family)
def test_a_video_keeps_its_limit(config: Any) -> None:
    frames, times = [photo(640, 480)] * 4, [0.0, 1.0, 2.0, 3.0]
    assert video_layout(frames, times, config, 700).tokens <= 700
    with pytest.raises(HearthError) as caught:
        video_layout(frames, times, config, 1)
    assert caught.value.code == "image_too_large"


@pytest.mark.parametrize(
    ("frames", "times"),
    [
        ([], []),
        ([photo(9, 9)], []),
        ([photo(9, 9), photo(9, 8)], [0.0, 1.0]),
        ([photo(9, 9), photo(9, 9)], [1.0, 1.0]),
        ([photo(9, 9), photo(9, 9)], [1.0, 0.5]),
        ([photo(9, 9), photo(9, 9)], [0.0, float("nan")]),
        ([photo(1, 900), photo(1, 900)], [0.0, 1.0]),
        ([photo(9, 9)], [0.0]),
    ],
)
def test_what_is_no_video_is_refused(frames: Any, times: Any) -> None:
    with pytest.raises(HearthError) as caught:
        video_layout(frames, times, QWEN3)
    assert caught.value.code == "image_invalid"


@pytest.mark.parametrize(
    "config",
    [
        QWEN3,
        QWEN2_5,
        config_like("idefics3"),
        config_like("idefics3", splits=False),
        msgspec.structs.replace(QWEN3, max_patches=4096),
    ],
)
def test_above_its_largest_square_a_picture_is_made_smaller(config: VisionConfig) -> None:
    side = largest_square(config)
    assert layout_of(photo(side, side), config).height == side
    above = side + 2 * config.patch_size * config.merge_size
    assert layout_of(photo(above, above), config).height < above


@pytest.mark.reference
def test_images_are_sized_as_by_the_processors() -> None:
    qwen = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    for config in (QWEN3, QWEN2_5):
        unit = config.patch_size * 2
        for width, height in [*SIZES, *some_sizes()]:
            limits = config.rules.min_pixels, config.rules.max_pixels
            expected = qwen.smart_resize(height, width, unit, *limits)
            layout = layout_of(photo(width, height), config)
            assert (layout.height, layout.width) == expected, (width, height)


@pytest.mark.reference
def test_videos_are_sized_as_by_the_processors() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    rules = QWEN3.rules
    for width, height in [*SIZES, *some_sizes()]:
        for count in (2, 3, 5, 16):
            limits = rules.video_min_pixels, rules.video_max_pixels
            expected = qwen.smart_resize(count, height, width, 2, 32, *limits)
            times = [float(second) for second in range(count)]
            layout = video_layout([photo(width, height)] * count, times, QWEN3)
            assert (layout.height, layout.width) == expected, (width, height, count)


@pytest.mark.reference
def test_frames_of_smolvlm_are_sized_as_by_its_processor() -> None:
    module = pytest.importorskip("transformers.models.smolvlm.video_processing_smolvlm")
    torch = pytest.importorskip("torch")
    times = [0.0, 1.0]
    for longest in (500, 9000):
        config = config_like("idefics3", video_longest_edge=longest)
        for width, height in [*SIZES, *some_sizes()]:
            layout = video_layout([photo(width, height)] * 2, times, config)
            video = torch.empty((1, height, width), device="meta")
            expected = module.get_resize_output_image_size(video, longest)
            assert first_size(height, width, layout, config) == expected, (width, height)


def some_sizes() -> list[tuple[int, int]]:
    numbers = random.Random(7)
    widths = [numbers.randrange(1, 4000) for _ in range(300)]
    return [
        (width, numbers.randrange(width // 200 + 1, min(4000, width * 200))) for width in widths
    ]


PATCHED = [(224, 224), (640, 480), (1, 1), (7, 130), (333, 60), (500, 501), (1456, 364)]


def patches_of(pixels: NDArray[np.uint8], config: VisionConfig) -> NDArray[np.uint8]:
    height, width, _ = pixels.shape
    layout = layout_of(photo(width, height), config)
    out = np.full((layout.patches, config.patch_bytes), 7, np.uint8)
    patch(Image.fromarray(pixels), layout, config, out)
    return out


def levels(values: NDArray[Any]) -> NDArray[np.int64]:
    """What a processor normalised, as 0 to 255 again."""
    return np.rint((values * 0.5 + 0.5) * 255).astype(np.int64)


def assert_close(ours: NDArray[np.uint8], theirs: NDArray[np.int64]) -> None:
    off = np.abs(ours - theirs)
    assert off.max() <= 2
    assert (off <= 1).mean() >= 0.999


@pytest.mark.reference
@pytest.mark.parametrize("size", PATCHED, ids=str)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_patches_are_those_of_qwens_processor(family: Any, size: tuple[int, int]) -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    config = config_like(family)
    rules, half = config.rules, [0.5, 0.5, 0.5]
    processor = module.Qwen2VLImageProcessorPil(
        patch_size=config.patch_size,
        size={"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels},
        image_mean=half,
        image_std=half,
    )
    pixels = draw(*size)
    theirs = processor(Image.fromarray(pixels), return_tensors="np")
    layout = layout_of(photo(*size), config)
    assert theirs["image_grid_thw"].tolist() == [list(layout.grid)]
    assert_close(patches_of(pixels, config), levels(theirs["pixel_values"]))


@pytest.mark.reference
@pytest.mark.parametrize("size", PATCHED, ids=str)
@pytest.mark.parametrize(
    "rules",
    [{}, {"splits": False}, {"longest_edge": 150}, {"longest_edge": 56}],
    ids=str,
)
def test_patches_are_those_of_idefics_processor(
    rules: dict[str, Any], size: tuple[int, int]
) -> None:
    check_tiles(draw(*size), config_like("idefics3", tile_size=56, **{"longest_edge": 224} | rules))


@pytest.mark.reference
def test_there_is_a_longest_edge_for_all_models() -> None:
    check_tiles(draw(7, 130), config_like("idefics3", longest_edge=5000))


@pytest.mark.reference
@pytest.mark.parametrize("size", [(224, 224), (333, 60)], ids=str)
def test_what_is_left_of_a_tile_is_not_seen(size: tuple[int, int]) -> None:
    # As with SmolVLM2 of 2.2B: tiles of 384 pixels, patches of 14.
    check_tiles(draw(*size), config_like("idefics3", tile_size=65, longest_edge=260))


def check_tiles(pixels: NDArray[np.uint8], config: VisionConfig) -> None:
    module = pytest.importorskip("transformers.models.smolvlm.image_processing_pil_smolvlm")
    rules = config.rules
    processor = module.SmolVLMImageProcessorPil(
        size={"longest_edge": rules.longest_edge},
        max_image_size={"longest_edge": rules.tile_size},
        do_image_splitting=rules.splits,
    )
    theirs = processor(Image.fromarray(pixels), return_tensors="np", return_row_col_info=True)
    layout = layout_of(photo(*pixels.shape[1::-1]), config)
    assert (theirs["rows"], theirs["cols"]) == ([[layout.rows]], [[layout.columns]])
    side = rules.tile_size // 14
    merge, blocks = config.merge_size, side // config.merge_size
    tiles = levels(theirs["pixel_values"][0])[..., : 14 * side, : 14 * side]
    tiles = tiles.reshape(-1, 3, blocks, merge, 14, blocks, merge, 14)
    rows = tiles.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, config.patch_bytes)
    assert_close(patches_of(pixels, config), rows)


def test_each_patch_is_a_square_by_colour() -> None:
    config = config_like("qwen3_vl", min_pixels=1)
    pixels = draw(128, 64)
    out = patches_of(pixels, config).reshape(4 * 8, 3, 2, 16, 16)
    square = pixels[16:32, 32:48].transpose(2, 0, 1)
    # Blocks of two by two: the patch in row 1 and column 2 is the third of the second block.
    np.testing.assert_array_equal(out[6], np.stack([square, square], axis=1))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "idefics3"])
def test_the_frames_of_a_video_go_where_they_belong(family: Any, count: int) -> None:
    # Here a frame and a picture are resized alike.
    config = config_like(family, splits=False, longest_edge=500)
    frames = [draw(96, 64, seed) for seed in range(count)]
    layout = video_layout([photo(96, 64)] * count, [0.0, 1.0, 2.0][:count], config)
    out = np.zeros((layout.patches, config.patch_bytes), np.uint8)
    for number, pixels in enumerate(frames):
        patch(Image.fromarray(pixels), layout, config, out, frame=number)
    depth = config.temporal_patch_size
    parts = out.reshape(layout.segments * layout.grid[0], -1, 3, depth, config.patch_size**2)
    still = ImageLayout(layout.height, layout.width, (1, *layout.grid[1:]), 0)
    for place in range(parts.shape[0] * depth):
        alone = np.zeros((still.patches, config.patch_bytes), np.uint8)
        patch(Image.fromarray(frames[min(place, count - 1)]), still, config, alone)
        expected = alone.reshape(-1, 3, depth, config.patch_size**2)[:, :, 0]
        np.testing.assert_array_equal(parts[place // depth, :, :, place % depth], expected)


def test_pixels_need_not_lie_close() -> None:
    config = config_like("qwen2_5_vl")
    wide = draw(200, 90)
    padded = np.zeros((90, 210, 3), np.uint8)
    padded[:, :200] = wide
    np.testing.assert_array_equal(patches_of(padded[:, :200], config), patches_of(wide, config))
    flipped = np.ascontiguousarray(wide[:, :, ::-1])
    np.testing.assert_array_equal(patches_of(flipped[:, :, ::-1], config), patches_of(wide, config))


def test_a_file_gives_what_its_pixels_give() -> None:
    data = file_of(draw(60, 40), "png")
    with Image.open(BytesIO(data)) as image:
        again = np.asarray(image)
    config = config_like("idefics3")
    np.testing.assert_array_equal(patches_of(again, config), patches_of(draw(60, 40), config))


@pytest.mark.parametrize("size", [(1000, 701), (1920, 1080), (333, 4000)], ids=str)
@pytest.mark.parametrize("resample", [Image.Resampling.BICUBIC, Image.Resampling.LANCZOS], ids=str)
def test_strips_of_a_large_picture_have_no_seams(
    size: tuple[int, int], resample: Image.Resampling
) -> None:
    image = Image.fromarray(draw(*size))
    for width, height in ((240, 129), (501, 700)):
        whole = np.asarray(image.resize((width, height), resample)).astype(int)
        off = np.abs(np.asarray(_resized(image, width, height, resample)) - whole)
        assert off.max() <= 1
        assert (off == 0).mean() > 0.999
