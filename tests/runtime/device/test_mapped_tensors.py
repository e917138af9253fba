import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hearth.runtime.device.mapped_tensors import map_tensor
from hearth.runtime.errors import HearthError


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_tensor_is_mapped_as_it_was_saved(tmp_path: Path, dtype: type) -> None:
    path = tmp_path / "weights.safetensors"
    table: NDArray[Any] = np.arange(6, dtype=np.float32).reshape(2, 3).astype(dtype)
    save_file({"other": np.ones(5, np.float32), "embedding": table}, path)
    mapped = map_tensor(path, "embedding")
    assert mapped.dtype == table.dtype
    assert np.array_equal(mapped, table)
    assert not mapped.flags.writeable


def test_the_bytes_of_the_file_are_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"embedding": np.zeros(2, np.float32)}, path)
    mapped = map_tensor(path, "embedding")
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(np.float32(7).tobytes())
    assert mapped.tolist() == [0, 7]


def _file(header: Any, body: bytes = bytes(8)) -> bytes:
    encoded = header if isinstance(header, bytes) else msgspec.json.encode(header)
    return struct.pack("<Q", len(encoded)) + encoded + body


def _entry(**changes: Any) -> dict[str, Any]:
    return {"embedding": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60) + b"{}",
        _file(b"not json"),
        _file({}),
        _file(_entry(dtype="I64")),
        _file(_entry(shape=[3])),
        _file(_entry(shape=[-1])),
        _file(_entry(data_offsets=[8, 0])),
        _file(_entry(data_offsets=[-8, 0])),
        _file(_entry(data_offsets=[0, 7])),
        _file(_entry(), body=bytes(4)),
        _file(_entry(data_offsets=[1 << 63, (1 << 63) + 8])),
        _file(_entry(data_offsets=[0, 10**30])),
        _file(_entry(data_offsets=[10**30, 0])),
        _file(_entry(shape=[10**30])),
        _file(b'{"embedding":' + b"[" * 100_000),
        _file(_entry(), body=bytes(9)),
        _file(_entry(data_offsets=[1, 9]), body=bytes(9)),
        _file({**_entry(), "other": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
        _file({**_entry(), "other": {"dtype": "U8", "shape": [1], "data_offsets": [9, 10]}}),
        _file(msgspec.json.encode(_entry())[:-1] + b"," + msgspec.json.encode(_entry())[1:]),
    ],
)
def test_a_broken_file_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "embedding.safetensors"
    path.write_bytes(content)
    with pytest.raises(HearthError) as caught:
        map_tensor(path, "embedding")
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", "embedding.safetensors")


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(HearthError, match=r"rope\.safetensors"):
        map_tensor(tmp_path / "rope.safetensors", "cos")
