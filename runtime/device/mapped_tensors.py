import json
import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.errors import Code, HearthError

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


class StoredTensor(NamedTuple):
    """Type and shape of a tensor in a file, whose bytes begin at `begin`."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int


class TensorFile:
    """A safetensors file whose tensors are read one by one; one handle, however many they are.

    The constructor reads the header; it and `read` raise errors of `code`, with the name of file or
    tensor as the field. As the format demands, no name may occur twice, and each byte behind the
    header belongs to one tensor. The caller closes the file.
    """

    def __init__(self, path: Path, code: Code) -> None:
        self._name, self._code = path.name, code
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise self._no_file(path) from error
        try:
            header, start = _header_of(self._file)
            entries = {
                name: msgspec.json.decode(entry, type=_Entry)
                for name, entry in header.items()
                if name != "__metadata__"
            }
            space = os.fstat(self._file.fileno()).st_size - start
            self.tensors = {
                name: self._stored(name, one, start, space) for name, one in entries.items()
            }
            self._check_places(entries.values(), space)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self.close()
            raise self._no_file(path) from error
        except HearthError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; tensors that were read stay."""
        self._file.close()

    def read(self, name: str) -> NDArray[Any]:
        """A read-only tensor in memory of its own; raises if the file was cut meanwhile."""
        stored = self.tensors[name]
        try:
            self._file.seek(stored.begin)
            data = self._file.read(math.prod(stored.shape) * stored.dtype.itemsize)
            return np.frombuffer(data, stored.dtype).reshape(stored.shape)
        except (OSError, ValueError) as error:
            text = f"{self._name} was changed while {name} was read"
            raise HearthError(self._code, text, name) from error

    def _stored(self, name: str, entry: _Entry, start: int, space: int) -> StoredTensor:
        begin, end = entry.data_offsets
        if entry.dtype not in DTYPES:
            text = f"{name} has type {entry.dtype}, which is not read"
            raise HearthError(self._code, text, name)
        stored = StoredTensor(DTYPES[entry.dtype], tuple(entry.shape), start + begin)
        size = math.prod(stored.shape) * stored.dtype.itemsize
        if not begin <= end <= space or end - begin != size:
            text = f"{self._name} has no whole tensor {name}: it is damaged or cut short"
            raise HearthError(self._code, text, name)
        return stored

    def _check_places(self, entries: Iterable[_Entry], space: int) -> None:
        try:
            _check_places(entries, space)
        except ValueError as error:
            text = f"{self._name} has bytes that are of no tensor, or of two: save it again"
            raise HearthError(self._code, text, self._name) from error

    def _no_file(self, path: Path) -> HearthError:
        return HearthError(self._code, f"{path} is missing or no safetensors file", path.name)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to be read; raises OSError for a pipe or a device, which might never end."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(0, "it is no regular file")
    return os.fdopen(number, "rb")


def _map(path: Path, name: str) -> NDArray[Any]:
    header, start = read_header(path)
    header.pop("__metadata__", None)
    entries = {one: msgspec.json.decode(raw, type=_Entry) for one, raw in header.items()}
    _check_places(entries.values(), path.stat().st_size - start)
    return _mapped(path, entries[name], start)


def _check_places(entries: Iterable[_Entry], space: int) -> None:
    """Raise ValueError unless the tensors fill `space` bytes side by side."""
    end = 0
    for begin, behind in sorted(entry.data_offsets for entry in entries):
        if begin != end:
            raise ValueError("tensors have something between them, or in common")
        end = behind
    if end != space:
        raise ValueError("the tensors do not end with the file")


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

    Raises OSError, ValueError or `msgspec.MsgspecError` for a file of another format, or a header
    with a key twice.
    """
    with open_regular(path) as file:
        return _header_of(file)


def _header_of(file: BinaryIO) -> tuple[dict[str, msgspec.Raw], int]:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > _HEADER_LIMIT:
        raise ValueError("the header is too long")
    data = file.read(length)
    try:
        header = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        json.loads(data, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("the header is too deep") from error
    return header, _LENGTH_BYTES + length


def _unique(pairs: list[tuple[str, object]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice in the header")
