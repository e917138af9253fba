from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hearth.runtime.image_processing.patches import _resized, patch
from hearth.runtime.image_processing.sizes import layout_of, video_layout
from hearth.runtime.images import ImageLayout
from hearth.runtime.vision_config import VisionConfig
from tests.runtime.image_processing.photographs import config_like, draw, file_of, photo

SIZES = [(224, 224), (640, 480), (1, 1), (7, 130), (333, 60), (500, 501), (1456, 364)]


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
@pytest.mark.parametrize("size", SIZES, ids=str)
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
@pytest.mark.parametrize("size", SIZES, ids=str)
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
