import io
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from hearth.runtime.export.writer import ALIGNMENT, DataFile, TensorPieces, write_safetensors


def test_tensors_begin_at_pages_and_follow_each_other() -> None:
    file, counted = io.BytesIO(), list[int]()
    data = DataFile(file, counted.append)
    assert data.append([np.zeros(10, np.uint8), np.ones(5, np.uint8)]) == (0, 15)
    assert data.append([np.full((2, 3), 7, np.float32)]) == (ALIGNMENT, 24)
    assert data.append(iter([])) == (2 * ALIGNMENT, 0)
    assert counted == [10, 5, 24]
    content = file.getvalue()
    assert content[:15] == bytes(10) + b"\1" * 5
    assert content[ALIGNMENT : ALIGNMENT + 24] == np.full(6, 7, np.float32).tobytes()


def test_a_piece_that_is_not_contiguous_is_written_in_its_order() -> None:
    file = io.BytesIO()
    DataFile(file, lambda _: None).append([np.arange(6, dtype=np.uint8).reshape(2, 3).T])
    assert file.getvalue() == bytes([0, 3, 1, 4, 2, 5])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_safetensors_file_reads_back(tmp_path: Path, dtype: type) -> None:
    table: NDArray[Any] = np.arange(12).reshape(4, 3).astype(dtype)
    row: NDArray[Any] = np.array([5], dtype)
    offsets = write_safetensors(
        tmp_path / "file",
        {
            "table": TensorPieces(table.dtype, (4, 3), iter([table[:3], table[3:]])),
            "row": TensorPieces(row.dtype, (1,), [row]),
        },
    )
    stored = load_file(tmp_path / "file")
    np.testing.assert_array_equal(stored["table"], table)
    np.testing.assert_array_equal(stored["row"], row)
    content = (tmp_path / "file").read_bytes()
    assert offsets["table"] % ALIGNMENT == 0
    assert content[offsets["row"] :] == row.tobytes()
