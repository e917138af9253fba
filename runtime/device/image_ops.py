"""What the runtime asks of a device around steps that see images."""

from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from runtime.errors import HearthError
from runtime.pictures.positions import RowPositions
from runtime.tensors.tensor import Tensor


class RotaryTables(NamedTuple):
    """Rotary tables of every row, and what they are filled from; R counts rotated pairs."""

    cos_of: Tensor
    """[positions, R] float32."""
    sin_of: Tensor
    """As `cos_of`."""
    axes: Tensor
    """[R] int32: by which axis of a position each pair goes."""
    cos: Tensor
    """[max batch, slots, R] float32, the name of the binding."""
    sin: Tensor
    """As `cos`."""


class ImageOps(Protocol):
    """What images need around a step; work is queued on the device's stream."""

    def splice(self, target: Tensor, place: int, rows: NDArray[Any]) -> None:
        """Write `rows` [n, H] over those from `place` on of a buffer [.., H] that is read flat.

        They have been read when this returns. Raises `internal` where they do not fit.
        """

    def clear(self, target: Tensor, places: int) -> None:
        """Zero the first `places` rows of a buffer [.., H] that is read flat."""

    def fill_rotary(self, tables: RotaryTables, row: int, positions: RowPositions) -> None:
        """Fill the tables of a row, whose tokens stand at `positions`, in all of its slots."""


def check_splice(target: Tensor, place: int, rows: NDArray[Any]) -> None:
    """Raise `internal` where embeddings are of another type or width, or exceed the buffer."""
    size = target.shape[-1]
    fits = rows.ndim == 2 and rows.shape[1] == size and rows.dtype == target.dtype  # noqa: PLR2004 - rows and H
    if not fits or place < 0 or (place + len(rows)) * size * rows.itemsize > target.nbytes:
        raise HearthError(
            "internal",
            f"embeddings {rows.dtype} {rows.shape} do not fit into {target.name} at {place}",
            target.name,
        )
