"""Which patches go into one call of a vision tower; no engine."""

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
    """Segments of a picture, and where their patches and tokens begin among those of all."""

    image: int
    segments: list[Segment]
    patch: int
    token: int

    @property
    def patches(self) -> int:
        """Patches of these segments."""
        return sum(segment.patches for segment in self.segments)


class Call(NamedTuple):
    """Pieces whose patches, `patches` in all, go into the tower one behind the other."""

    pieces: list[Piece]
    patches: int


def sharing(layouts: Sequence[ImageLayout], config: VisionConfig) -> int:
    """How many pictures, the first ones, go into one call; a large one goes alone."""
    room = _shared_patches(config)
    for count, layout in enumerate(layouts):
        room -= layout.patches
        if room < 0:
            return max(1, count)
    return len(layouts)


def plan_calls(layouts: Sequence[ImageLayout], config: VisionConfig) -> list[Call]:
    """Calls that bring all segments of pictures through a tower, in order, as few as pay.

    Raises `image_too_large` for a segment that no call takes, as it cannot be divided.
    """
    shared = _shared_patches(config)
    calls: list[Call] = []
    for image, layout in enumerate(layouts):
        patch = 0
        for segment in segments_of(layout):
            if segment.patches > config.max_patches:
                raise HearthError(
                    "image_too_large",
                    f"a picture of {segment.patches} patches is too large for this model's vision "
                    f"tower, which takes {config.max_patches}: send a smaller one",
                    "content",
                )
            if not calls or calls[-1].patches + segment.patches > shared:
                calls.append(Call([], 0))
            pieces, patches = calls[-1]
            if not pieces or pieces[-1].image != image:
                pieces.append(Piece(image, [], patch, patch // config.merge_size**2))
            pieces[-1].segments.append(segment)
            calls[-1] = Call(pieces, patches + segment.patches)
            patch += segment.patches
    return calls


def _shared_patches(config: VisionConfig) -> int:
    return min(config.max_patches, _SHARED_WIDTHS * config.hidden_size)
