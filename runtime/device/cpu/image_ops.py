from typing import Any

from numpy.typing import NDArray

from runtime.device.image_ops import RotaryTables, check_splice
from runtime.pictures.positions import RowPositions
from runtime.reference.ops import fill_rotary, splice_rows
from runtime.tensors.tensor import Tensor


class CpuImageOps:
    """Copies embeddings and fills rotary tables with NumPy on the calling thread."""

    def splice(self, target: Tensor, place: int, rows: NDArray[Any]) -> None:
        """Write `rows` over those from `place` on."""
        check_splice(target, place, rows)
        splice_rows(target.array, place, rows)

    def clear(self, target: Tensor, places: int) -> None:
        """Zero the first rows of a buffer."""
        target.view((places, target.shape[-1])).fill(0)

    def fill_rotary(self, tables: RotaryTables, row: int, positions: RowPositions) -> None:
        """Fill cosine and sine of a row."""
        for table, out in ((tables.cos_of, tables.cos), (tables.sin_of, tables.sin)):
            fill_rotary(out.array[row], table.array, tables.axes.array, positions)
