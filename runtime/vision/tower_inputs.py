"""Inputs of a vision encoder beside patches, which follow from sizes alone.

A *segment* attends to itself alone: a picture, a tile of one, or one step in time of a
video. Its patches come block by block of those that become one token.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.errors import HearthError
from hearth.runtime.images import ImageLayout
from hearth.runtime.vision_config import VisionConfig

ROTARY_THETA = 10_000.0
"""Base frequency of every served tower that rotates."""
_LAST = np.float32(1.0 - 1e-6)


class Segment(NamedTuple):
    """Patches of a segment in height and width."""

    height: int
    width: int

    @property
    def patches(self) -> int:
        """All of them."""
        return self.height * self.width


def segments_of(layout: ImageLayout) -> list[Segment]:
    """The segments of a picture or a video, in the order of its patches."""
    time, height, width = layout.grid
    return [Segment(height, width)] * (layout.segments * time)


def tower_inputs(segments: Sequence[Segment], config: VisionConfig) -> dict[str, NDArray[Any]]:
    """The inputs of a call of the tower for T patches of `segments`, by binding, without patches.

    Integers are int64, other numbers float32. They are those that `transformers` computes in
    `vision_utils`, and in `Idefics3VisionEmbeddings`.
    """
    known = {segment: _inputs_of(segment, config) for segment in dict.fromkeys(segments)}
    parts = [known[segment] for segment in segments]
    patches = [segment.patches for segment in segments]
    made = {
        name: np.concatenate([part[name] for part in parts], axis=-1 if name in _WIDE else 0)
        for name in parts[0]
    }
    if "window_ids" in made:
        # No window of a segment is one of another's.
        windows = [int(part["window_ids"].max()) + 1 for part in parts]
        made["window_ids"] += np.repeat(np.cumsum([0, *windows[:-1]]), patches)
    return made | {"segment_ids": np.repeat(np.arange(len(segments)), patches)}


_WIDE = ("position_ids", "position_weights")


def _inputs_of(segment: Segment, config: VisionConfig) -> dict[str, NDArray[Any]]:
    rows, columns = _places(segment, config.merge_size)
    side = config.position_side
    match config.family:
        case "qwen3_vl":
            ids, weights = _interpolated(segment, rows, columns, side)
            rotary = _rotary(rows, columns, config.head_dim)
            return {"position_ids": ids, "position_weights": weights, **rotary}
        case "qwen2_5_vl":
            # The window's side in tokens, each of merge_size patches a side.
            window = config.window_size // config.patch_size // config.merge_size
            return {
                "window_ids": _windows(segment, rows, columns, window * config.merge_size),
                **_rotary(rows, columns, config.head_dim),
            }
        case "idefics3":
            learned_rows = _nearest(segment.height, side)[rows]
            return {
                "position_ids": (learned_rows * side + _nearest(segment.width, side)[columns])[None]
            }


def _places(segment: Segment, merge: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of each patch, in the order of the patches."""
    grid = np.arange(segment.patches).reshape(
        segment.height // merge, merge, segment.width // merge, merge
    )
    order = grid.transpose(0, 2, 1, 3).reshape(-1)
    return order // segment.width, order % segment.width


def _rotary(
    rows: NDArray[np.int64], columns: NDArray[np.int64], head_dim: int
) -> dict[str, NDArray[np.float32]]:
    """Cosines and sines [T, head_dim / 2]: the first half of them by row, the second by column."""
    half = head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    frequencies = np.float32(1) / np.float32(ROTARY_THETA) ** exponents
    places = np.stack([rows, columns], axis=1).astype(np.float32)
    angles = (places[:, :, None] * frequencies).reshape(len(rows), -1)
    return {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}


def _windows(
    segment: Segment, rows: NDArray[np.int64], columns: NDArray[np.int64], window: int
) -> NDArray[np.int64]:
    """The window of each patch, from 0; those at the right and the lower edge may be smaller."""
    return rows // window * -(-segment.width // window) + columns // window


def _interpolated(
    segment: Segment, rows: NDArray[np.int64], columns: NDArray[np.int64], side: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The four learned positions around each patch and their weights, both [4, T]; bilinear."""
    row_taps, row_weights = _taps(rows, segment.height, side)
    column_taps, column_weights = _taps(columns, segment.width, side)
    ids = row_taps[:, None] * side + column_taps[None]
    weights = row_weights[:, None] * column_weights[None]
    return ids.reshape(4, -1), weights.reshape(4, -1)


def _taps(
    index: NDArray[np.int64], size: int, side: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The places of a table's axis around each of `size` places, and their weights, both [2, T]."""
    place = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(1, size - 1))
    below = np.floor(place)
    taps = np.clip(below.astype(np.int64) + np.array([[0], [1]]), 0, side - 1)
    weight = place - below
    return taps, np.stack([1 - weight, weight])


def _nearest(size: int, side: int) -> NDArray[np.int64]:
    """Index among `side` learned places of each of `size` patches."""
    step = 1 / side
    borders = np.arange(step, 1.0, step).astype(np.float32)
    places = np.arange(size, dtype=np.float32) * (np.float32(1) / np.float32(size))
    found: NDArray[np.int64] = np.searchsorted(borders, np.minimum(places, _LAST), side="right")
    return found


_SHARED_WIDTHS = 2
"""Most patches that share a call, in hidden sizes, though no segment sees another's.

Attention then wastes at most a third of the layers' other work.
"""


class Piece(NamedTuple):
    """A segment of a picture, and where its patches begin among those of the picture."""

    image: int
    segment: Segment
    first: int


class Call(NamedTuple):
    """Pieces whose patches go into the tower one behind the other."""

    pieces: list[Piece]

    @property
    def patches(self) -> int:
        """Patches of all pieces."""
        return sum(piece.segment.patches for piece in self.pieces)


def pieces_of(image: int, layout: ImageLayout, config: VisionConfig) -> list[Piece]:
    """The pieces of a picture that is called `image`.

    Raises `image_too_large` for a segment that no call takes, as it cannot be divided, and
    `internal` for a layout that is not of this tower.
    """
    time, height, width = layout.grid
    merge, least = config.merge_size, min(time, height, width, layout.segments)
    if least < 1 or height % merge or width % merge or layout.tokens * merge**2 != layout.patches:
        raise HearthError("internal", f"{layout} is no layout of this vision tower")
    pieces, first = [], 0
    for segment in segments_of(layout):
        if segment.patches > config.max_patches:
            raise HearthError(
                "image_too_large",
                f"a picture of {segment.patches} patches is too large for this model's vision "
                f"tower, which takes {config.max_patches}: send a smaller one",
            )
        pieces.append(Piece(image, segment, first))
        first += segment.patches
    return pieces


def take_call(pieces: deque[Piece], most: int) -> Call:
    """Take the first pieces, of `most` patches in all, or one that is larger."""
    taken = [pieces.popleft()]
    room = most - taken[0].segment.patches
    while pieces and (room := room - pieces[0].segment.patches) >= 0:
        taken.append(pieces.popleft())
    return Call(taken)


def plan_calls(layouts: Sequence[ImageLayout], config: VisionConfig) -> list[Call]:
    """Calls that bring pictures through a tower, in order, as few as pay; raises as `pieces_of`."""
    listed = (pieces_of(image, layout, config) for image, layout in enumerate(layouts))
    pieces = deque(piece for image in listed for piece in image)
    calls = []
    while pieces:
        calls.append(take_call(pieces, shared_patches(config)))
    return calls


def sharing(layouts: Sequence[ImageLayout], config: VisionConfig) -> int:
    """Number of pictures, the first ones, that go into one call; a large one goes alone."""
    room = shared_patches(config)
    for count, layout in enumerate(layouts):
        room -= layout.patches
        if room < 0:
            return max(1, count)
    return len(layouts)


def shared_patches(config: VisionConfig) -> int:
    """The most patches of a call that is not of one segment alone."""
    return min(config.max_patches, _SHARED_WIDTHS * config.hidden_size)
