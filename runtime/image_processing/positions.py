"""Positions of the tokens of a prompt with images in time, height and width.

Source: Qwen2-VL, Wang et al. 2024 (multimodal rotary embedding), as transformers 5.23 counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.images import ImageSpan

_AXES = 3
# Beyond the capacity of any engine, and within 32 bits.
_FAR = 1 << 30


class RowPositions(NamedTuple):
    """The positions of a row: those of its prompt [3, length], none if it is text, and `delta`.

    A token behind the prompt has the position of its slot plus `delta`, on all three axes.
    """

    prompt: NDArray[np.int32]
    delta: int


PLAIN = RowPositions(np.zeros((_AXES, 0), np.int32), 0)
"""Positions of text: those of the slots."""


def row_positions(length: int, spans: Sequence[ImageSpan]) -> RowPositions:
    """The positions of a prompt of `length` tokens, whose images stand at `spans`, in order.

    Text counts on all axes alike, in the prompt and behind it. An image begins where text would
    go on, counts its grid from there, and moves the text behind it on by its longer side, also
    where a video counted further in time. Spans without a grid are text.
    """
    positions = np.empty((_AXES, length), np.int32)
    done = position = 0
    for span in spans:
        if not any(span.grid):
            continue
        ahead = span.start - done
        positions[:, done : span.start] = position + np.arange(ahead)
        position += ahead
        done = span.start + span.length
        positions[:, span.start : done] = position + _grid(span)
        position += max(span.grid[1:])
    if not done:
        return PLAIN
    positions[:, done:] = position + np.arange(length - done)
    return RowPositions(positions, position - done)


def pair_axes(sections: Sequence[int], *, interleaved: bool) -> NDArray[np.int32]:
    """The axis whose position each rotated pair goes by; `sections` counts the pairs of each.

    They lie one behind the other, or take turns until height and width have had theirs.
    """
    if not interleaved:
        return np.repeat(np.arange(_AXES, dtype=np.int32), sections)
    axes = np.zeros(sum(sections), np.int32)
    for axis in (1, 2):
        axes[axis : sections[axis] * _AXES : _AXES] = axis
    return axes


def _grid(span: ImageSpan) -> NDArray[np.int64]:
    """Positions [3, length] within a span, from 0 on."""
    time, height, width = np.indices(span.grid).reshape(_AXES, -1)
    # In float32, as the reference does: a product just below a whole number is cut.
    later = time.astype(np.float32) * np.float32(min(span.interval, _FAR))
    time = np.minimum(later, _FAR).astype(np.int64)
    return np.stack((time, height, width))
