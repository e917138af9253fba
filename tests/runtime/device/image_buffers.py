"""Buffers of steps with images, for tests of every device."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.device import RotaryTables
from hearth.runtime.image_processing.positions import PLAIN, RowPositions, row_positions
from hearth.runtime.images import ImageSpan
from hearth.runtime.tensors.tensor import Tensor

ROWS, SLOTS, PAIRS, POSITIONS = 3, 20, 6, 20
ROW_POSITIONS: list[RowPositions] = [
    PLAIN,
    row_positions(11, [ImageSpan(1, 6, 0, (1, 2, 3)), ImageSpan(8, 2, 0, (1, 1, 2))]),
    # A video whose steps in time are so long that positions run ahead of slots.
    row_positions(9, [ImageSpan(2, 4, 0, (4, 1, 1), 3.0)]),
]


def rotary_tables(constant: Callable[[str, NDArray[Any]], Tensor]) -> RotaryTables:
    """Tables of three rows; pairs go by time, height and width in turn."""
    random = np.random.default_rng(5)
    cos_of, sin_of = random.standard_normal((2, POSITIONS, PAIRS), np.float32)
    empty = np.full((ROWS, SLOTS, PAIRS), 9, np.float32)
    return RotaryTables(
        cos_of=constant("cos_of", cos_of),
        sin_of=constant("sin_of", sin_of),
        axes=constant("axes", np.arange(PAIRS, dtype=np.int32) % 3),
        cos=constant("rope_cos", empty),
        sin=constant("rope_sin", empty.copy()),
    )
