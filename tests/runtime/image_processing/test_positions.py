"""Positions of rows with images, against those that transformers counts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hearth.runtime.image_processing.positions import PLAIN, pair_axes, row_positions
from hearth.runtime.images import ImageSpan

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
