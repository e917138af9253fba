import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.errors import HearthError
from hearth.runtime.images import ImageLayout
from hearth.runtime.vision_config import VisionConfig
from tests.runtime.vision.fake_tower import expected, fake_runner
from tests.runtime.vision.tower_config import config_of

Image = tuple[NDArray[np.uint8], ImageLayout]
CONFIG = config_of(
    "qwen3_vl",
    deepstack_layers=(0, 1),
    position_side=4,
    patch_size=2,
    max_patches=48,
    hidden_size=16,
)
TILES = config_of(
    "idefics3",
    position_side=4,
    patch_size=2,
    temporal_patch_size=1,
    max_patches=40,
    hidden_size=16,
)


def image(config: VisionConfig, *grid: int, segments: int = 1) -> Image:
    time, height, width = grid
    patches = segments * time * height * width
    layout = ImageLayout(
        height=0, width=0, grid=(time, height, width), tokens=patches // 4, segments=segments
    )
    rng = np.random.default_rng(patches)
    return rng.integers(0, 256, (patches, config.patch_bytes), np.uint8), layout


@pytest.mark.parametrize(
    ("config", "images", "calls"),
    [
        (CONFIG, [image(CONFIG, 1, 4, 4)], [16]),
        # What attention computes for nothing bounds how many share a call.
        (CONFIG, [image(CONFIG, 1, 4, 4), image(CONFIG, 1, 2, 8)], [32]),
        (CONFIG, [image(CONFIG, 1, 4, 4), image(CONFIG, 1, 2, 8), image(CONFIG, 1, 2, 2)], [32, 4]),
        (CONFIG, [image(CONFIG, 1, 6, 8), image(CONFIG, 1, 2, 2)], [48, 4]),
        # A video is divided between two steps in time, a picture between two tiles.
        (CONFIG, [image(CONFIG, 5, 4, 4)], [32, 32, 16]),
        (TILES, [image(TILES, 1, 2, 6, segments=5)], [24, 24, 12]),
        (TILES, [image(TILES, 1, 2, 6, segments=1), image(TILES, 1, 4, 4, segments=2)], [28, 16]),
    ],
)
def test_pictures_get_their_own_embeddings(
    config: VisionConfig, images: list[Image], calls: list[int]
) -> None:
    runner, engine = fake_runner(config)
    out = runner.encode(images)
    assert engine.calls == calls
    for (patches, layout), embeddings in zip(images, out, strict=True):
        assert np.allclose(embeddings, expected(patches, layout, config))


def test_a_segment_above_the_largest_call_is_refused_before_anything_runs() -> None:
    runner, engine = fake_runner(CONFIG)
    images = [image(CONFIG, 1, 4, 4), image(CONFIG, 1, 10, 10)]
    with pytest.raises(HearthError) as caught:
        runner.encode(images)
    assert caught.value.code == "image_too_large"
    assert "100 patches" in caught.value.message
    assert engine.calls == []


@pytest.mark.parametrize(
    ("grid", "tokens", "segments"),
    [
        ((1, 3, 4), 3, 1),
        ((1, 4, 4), 5, 1),
        ((0, 4, 4), 0, 1),
        ((1, -4, -4), 4, 1),
        ((1, 4, 4), 0, 0),
    ],
)
def test_a_layout_of_another_tower_is_an_error(
    grid: tuple[int, int, int], tokens: int, segments: int
) -> None:
    runner, _ = fake_runner(CONFIG)
    layout = ImageLayout(0, 0, grid, tokens, segments)
    with pytest.raises(HearthError) as caught:
        runner.encode([(np.zeros((16, CONFIG.patch_bytes), np.uint8), layout)])
    assert caught.value.code == "internal"


def test_embeddings_that_are_no_numbers_are_an_error() -> None:
    runner, engine = fake_runner(CONFIG)
    images = [image(CONFIG, 1, 2, 2)]
    engine.factor = np.inf
    with pytest.raises(HearthError) as caught:
        runner.encode(images)
    assert caught.value.code == "non_finite"


def test_closing_frees_the_engine() -> None:
    runner, engine = fake_runner(CONFIG)
    runner.close()
    assert engine.calls == [-1]
