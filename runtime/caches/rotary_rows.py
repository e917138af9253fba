from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.arrangement import Arrangement, Seat
from runtime.caches.kv_cache_manager import check_alignment
from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device
from runtime.device.image_ops import RotaryTables
from runtime.pictures.positions import PLAIN, RowPositions, pair_axes, row_positions
from runtime.tensors.tensor import Tensor


class RotaryRows:
    """The rotary tables of each row, by its place, for an engine with tables of every row.

    What a slot holds follows from where the row's token stands: in text at its slot. So a table is
    filled anew where another row takes its place, and nothing of it moves.
    """

    def __init__(
        self, config: LLMEngineRunnerConfig, tables: dict[str, NDArray[Any]], device: Device
    ) -> None:
        batch, slots = config.max_supported_batch_size, config.max_kv_cache_capacity
        pairs, rope = config.rotary_dim // 2, config.rope_config
        if config.device == "cuda" and batch > 1:
            check_alignment(slots, pairs * 4)
        axes = pair_axes(rope.mrope_section, interleaved=rope.mrope_interleaved)
        cos_of, sin_of = (
            device.constant(f"rope_{name}_of", tables[name]) for name in ("cos", "sin")
        )
        cos, sin = (
            device.zeros(f"rope_{name}", (batch, slots, pairs), np.dtype(np.float32))
            for name in ("cos", "sin")
        )
        self._tables = RotaryTables(cos_of, sin_of, device.constant("rope_axes", axes), cos, sin)
        self._ops = device.image_ops
        self._rows: list[RowPositions] = []
        self._filled: list[RowPositions | None] = [None] * batch
        self.reset(batch)
        self.reset(0)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine [max batch, capacity, rotary_dim / 2], float32."""
        return self._tables.cos, self._tables.sin

    def rearrange(self, arrangement: Arrangement) -> None:
        """Let each row find its tables at its new place."""
        self._rows = arrangement.settle(self._rows, _positions)
        self._fill()

    def reset(self, batch: int) -> None:
        """Begin a batch of rows of text."""
        self._rows = [PLAIN] * batch
        self._fill()

    def positions(self, row: int, length: int) -> RowPositions:
        """Where the first `length` tokens of a row stand, and text behind them."""
        prompt, delta = self._rows[row]
        if length >= prompt.shape[1]:
            return RowPositions(prompt, delta)
        kept = prompt[:, :length]
        return RowPositions(kept, int(kept.max(initial=-1)) + 1 - length)

    def place(self, row: int, positions: RowPositions) -> None:
        """Let the tokens of a row stand elsewhere from now on."""
        self._rows[row] = positions
        self._fill()

    def _fill(self) -> None:
        for place, positions in enumerate(self._rows):
            if self._filled[place] is not positions:
                self._ops.fill_rotary(self._tables, place, positions)
                self._filled[place] = positions


def _positions(seat: Seat) -> RowPositions:
    row = seat.request
    spans = [span for image in row.images for span in image.spans]
    return row_positions(row.prompt_length, spans)
