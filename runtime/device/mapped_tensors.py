import os
import stat
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import Code, HearthError

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
Size = Annotated[int, msgspec.Meta(ge=0)]
_LENGTH_BYTES = 8
_HEADER_LIMIT = 1 << 20

MappedTensors = dict[str, NDArray[Any]]
"""Tensors of a file by name."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[Size]
    data_offsets: tuple[Size, Size]


def map_tensor(path: Path, name: str) -> NDArray[Any]:
    """Tensor `name` of a safetensors file, read-only and mapped into memory, never copied.

    The library itself copies; a table of hundreds of megabytes must not be held twice. Raises
    `engine_corrupt` with the file's name. Format: https://huggingface.co/docs/safetensors.
    """
    try:
        return _map(path, name)
    except (OSError, ValueError, KeyError, msgspec.MsgspecError) as error:
        raise HearthError(
            "engine_corrupt",
            f"{path} has no readable tensor {name}: export the model again",
            path.name,
        ) from error


def map_tensors(path: Path, code: Code) -> MappedTensors:
    """All tensors of a safetensors file, read-only and mapped into memory.

    Raises an error of `code` that names the file, or the tensor that cannot be read.
    """
    try:
        header, start = read_header(path)
        entries = {
            name: msgspec.json.decode(entry, type=_Entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise HearthError(code, f"{path} is missing or no safetensors file", path.name) from error
    return {name: _named(path, name, entry, start, code) for name, entry in entries.items()}


def copy_tensor(path: Path, name: str, mapped: NDArray[Any], code: Code) -> NDArray[Any]:
    """What `map_tensors` has mapped, read into memory.

    Of a file that was cut meanwhile this is an error of `code`, naming the tensor, where to touch
    what is mapped would end the process.
    """
    try:
        header, start = read_header(path)
        begin, _ = msgspec.json.decode(header[name], type=_Entry).data_offsets
        with open_regular(path) as file:
            file.seek(start + begin)
            data = file.read(mapped.nbytes)
        return np.frombuffer(data, mapped.dtype).reshape(mapped.shape)
    except (OSError, ValueError, KeyError, OverflowError, msgspec.MsgspecError) as error:
        raise HearthError(code, f"{path.name} was changed while {name} was read", name) from error


def open_regular(path: Path) -> BinaryIO:
    """Open a file to be read; raises OSError for a pipe or a device, which might never end."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(0, "it is no regular file")
    return os.fdopen(number, "rb")


def _named(path: Path, name: str, entry: _Entry, start: int, code: Code) -> NDArray[Any]:
    try:
        return _mapped(path, entry, start)
    except KeyError as error:
        what = f"{name} has type {entry.dtype}, which is not read"
        raise HearthError(code, what, name) from error
    except (OSError, ValueError) as error:
        what = f"{path.name} has no whole tensor {name}: it is damaged or cut short"
        raise HearthError(code, what, name) from error


def _map(path: Path, name: str) -> NDArray[Any]:
    header, start = read_header(path)
    return _mapped(path, msgspec.json.decode(header[name], type=_Entry), start)


def _mapped(path: Path, entry: _Entry, start: int) -> NDArray[Any]:
    begin, end = entry.data_offsets
    if not begin <= end <= path.stat().st_size - start:
        raise ValueError("the data are not in the file")
    dtype = DTYPES[entry.dtype]
    flat = np.memmap(path, np.uint8, "r", offset=start + begin, shape=(end - begin,))
    # Sizes that disagree with the type or the shape fail here.
    return np.asarray(flat).view(dtype).reshape(entry.shape)


def read_header(path: Path) -> tuple[dict[str, msgspec.Raw], int]:
    """The header of a safetensors file, and the offset at which its data begin.

    Raises OSError, ValueError or `msgspec.MsgspecError` for what is none.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _HEADER_LIMIT:
            raise ValueError("the header is too long")
        data = file.read(length)
    try:
        header = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except RecursionError as error:
        raise ValueError("the header is too deep") from error
    return header, _LENGTH_BYTES + length
