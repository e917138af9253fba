"""The inputs of a tower against the functions by which transformers computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hearth.runtime.images import ImageLayout
from hearth.runtime.vision.tower_inputs import Segment, segments_of, tower_inputs
from tests.runtime.vision.tower_config import config_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hearth.runtime.vision_config import VisionConfig

torch = pytest.importorskip("torch")
vision = pytest.importorskip("transformers.vision_utils")

GRIDS = [(1, 4, 6), (2, 10, 4), (1, 22, 14), (3, 6, 18)]


def given(config: VisionConfig, grids: list[tuple[int, int, int]]) -> dict[str, NDArray[Any]]:
    layouts = [ImageLayout(height=0, width=0, grid=grid, tokens=0) for grid in grids]
    return tower_inputs([one for layout in layouts for one in segments_of(layout)], config)


def runs(ends: Any) -> NDArray[np.int64]:
    """The number of the run that each place lies in, of cumulative ends."""
    lengths = np.diff(ends.numpy())
    return np.repeat(np.arange(len(lengths)), lengths)


def rotary_of(positions: Any, head_dim: int) -> tuple[Any, Any]:
    """As Qwen3VLVisionRotaryEmbedding computes them, the first half of the head alone."""
    half = head_dim // 2
    frequencies = 1.0 / (10_000.0 ** (torch.arange(0, half, 2, dtype=torch.float) / half))
    angles = (positions[..., None].float() * frequencies).reshape(len(positions), -1)
    return angles.cos(), angles.sin()


def test_qwen3_vl_positions_and_segments() -> None:
    config = config_of("qwen3_vl", position_side=12)
    made, grid = given(config, GRIDS), torch.tensor(GRIDS)
    ids, weights = vision.get_vision_interpolation_indices_and_weights(
        grid, 12, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    assert np.array_equal(made["position_ids"], ids.T)
    assert np.abs(made["position_weights"] - weights.T.numpy()).max() < 1e-6
    assert np.array_equal(made["segment_ids"], runs(vision.get_vision_cu_seqlens(grid)))
    cos, sin = rotary_of(vision.get_vision_position_ids(grid, 2), config.head_dim)
    assert np.abs(made["rotary_cos"] - cos.numpy()).max() < 1e-5
    assert np.abs(made["rotary_sin"] - sin.numpy()).max() < 1e-5
    assert made["rotary_cos"].dtype == made["position_weights"].dtype == np.float32


@pytest.mark.parametrize("window_size", [56, 112])
def test_qwen2_5_vl_windows(window_size: int) -> None:
    config = config_of("qwen2_5_vl", window_size=window_size)
    made, grid = given(config, GRIDS), torch.tensor(GRIDS)
    order, ends = vision.get_vision_window_index(grid, 2, window_size, 14)
    # transformers brings the tokens of a window together; ours are told which window is theirs.
    theirs = np.empty(made["window_ids"].size // 4, np.int64)
    theirs[order.numpy()] = runs(ends)[::4]
    expected = np.repeat(theirs, 4)
    assert same_groups(made["window_ids"], expected)
    assert set(made) == {"segment_ids", "window_ids", "rotary_cos", "rotary_sin"}


def same_groups(one: NDArray[np.int64], other: NDArray[np.int64]) -> bool:
    return np.array_equal(one[:, None] == one, other[:, None] == other)


@pytest.mark.parametrize("side", [8, 14, 26, 27, 32, 70])
def test_idefics3_positions_are_the_nearest(side: int) -> None:
    transformers = pytest.importorskip("transformers.models.idefics3.modeling_idefics3")
    settings = pytest.importorskip("transformers.models.idefics3.configuration_idefics3")
    shape = settings.Idefics3VisionConfig(hidden_size=1, image_size=2 * side, patch_size=2)
    embeddings = transformers.Idefics3VisionEmbeddings(shape)
    # Each position's embedding is its own number.
    embeddings.position_embedding.weight.data = torch.arange(float(side**2))[:, None]
    embeddings.patch_embedding.weight.data.zero_()
    embeddings.patch_embedding.bias.data.zero_()
    even = side // 2 * 2
    for height, width in ((even, even), (even - 2, 4), (2 * side, even)):
        pixels, mask = torch.zeros(1, 3, 2 * height, 2 * width), torch.ones(1, height, width)
        ids = embeddings(pixels, mask.bool())[0, :, 0].detach().numpy().astype(np.int64)
        made = tower_inputs([Segment(height, width)], config_of("idefics3", position_side=side))
        blocks = ids.reshape(height // 2, 2, width // 2, 2).transpose(0, 2, 1, 3).reshape(-1)
        assert np.array_equal(made["position_ids"], blocks[None])


def test_tiles_are_segments_of_their_own() -> None:
    layout = ImageLayout(height=8, width=8, grid=(1, 2, 4), tokens=6, segments=3, rows=1, columns=2)
    made = tower_inputs(segments_of(layout), config_of("idefics3", position_side=4))
    assert np.array_equal(made["segment_ids"], np.repeat([0, 1, 2], 8))
    assert made["position_ids"].shape == (1, 24)
