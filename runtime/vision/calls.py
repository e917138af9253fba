"""Which patches go into one call of a vision tower; no engine."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from runtime.errors import HearthError
from runtime.images import ImageLayout
from runtime.vision.tower_inputs import Segment, segments_of
from runtime.vision_config import VisionConfig

_SHARED_WIDTHS = 2
"""How many patches share a call, in hidden sizes, though none sees another's.

What attention then computes for nothing is at most a third of the layers' other work.
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
    """How many pictures, the first ones, go into one call; a large one goes alone."""
    room = shared_patches(config)
    for count, layout in enumerate(layouts):
        room -= layout.patches
        if room < 0:
            return max(1, count)
    return len(layouts)


def shared_patches(config: VisionConfig) -> int:
    """The most patches of a call that is not of one segment alone."""
    return min(config.max_patches, _SHARED_WIDTHS * config.hidden_size)
