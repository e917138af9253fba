"""The tensors of a Hugging Face folder, in one or many safetensors files."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from hearth.runtime.errors import HearthError
from hearth.runtime.export.json_file import read_json

Array = NDArray[Any]
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SOURCE_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class TensorSpec(NamedTuple):
    """File, shape, type (as safetensors names it) and stored name of a tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    name: str


class Checkpoint:
    """Tensors by name, read piece by piece.

    A file is mapped only while a piece of it is read, so that its pages do not stay resident.
    Every method raises `model_invalid` naming the file or the tensor at fault. `rename` turns the
    names in the files into those that all methods use.
    """

    def __init__(self, folder: Path, rename: Callable[[str], str] = str) -> None:
        self._folder = folder
        self._specs: dict[str, TensorSpec] = {}
        for stored, spec in _read_specs(folder).items():
            name = rename(stored)
            if name in self._specs:
                raise HearthError("model_invalid", f"the model holds {name} twice", name)
            self._specs[name] = spec

    @property
    def stored_dtype(self) -> np.dtype[Any] | None:
        """The type of most of its numbers; None for one that is not read."""
        counted = Counter[str]()
        for spec in self._specs.values():
            counted[spec.dtype] += math.prod(spec.shape)
        return SOURCE_TYPES.get(max(counted, key=counted.__getitem__, default=""))

    @property
    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._specs)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise unless the tensor is there with this shape and a floating-point type."""
        spec = self._spec(name)
        if spec.dtype not in SOURCE_TYPES:
            raise HearthError(
                "model_invalid", f"{name} in {spec.file} has type {spec.dtype}: only "
                f"{', '.join(SOURCE_TYPES)} are read", name,
            )  # fmt: skip
        if spec.shape != shape:
            raise HearthError(
                "model_invalid", f"{name} in {spec.file} has shape {list(spec.shape)}, "
                f"config.json implies {list(shape)}", name,
            )  # fmt: skip

    def check_all(
        self,
        expected: Iterable[tuple[str, tuple[int, ...]]],
        spare: Callable[[str], object],
        model: str,
    ) -> None:
        """Raise for the first tensor that does not fit, or that nothing would read.

        `expected` are names and shapes. A tensor that is not among them and not `spare` raises
        `model_unsupported`: it has no place in `model`.
        """
        known = set()
        for name, shape in expected:
            self.check(name, shape)
            known.add(name)
        for name in self.names:
            if name not in known and not spare(name):
                raise HearthError(
                    "model_unsupported", f"tensor {name} has no place in {model}", name
                )

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type in which a checked tensor is stored."""
        return SOURCE_TYPES[self._spec(name).dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._spec(name).shape

    def vector(self, name: str) -> Array:
        """A whole one-dimensional tensor."""
        return self._read(name, slice(None))

    def matrix(self, name: str, rows: slice, columns: slice) -> Array:
        """Some rows and columns of a matrix; a convolution's axes but the first are columns."""
        if len(self._spec(name).shape) > 2:  # noqa: PLR2004 - more than a matrix has
            kernels = self._read(name, rows)
            return kernels.reshape(len(kernels), -1)[:, columns]
        return self._read(name, (rows, columns))

    def _read(self, name: str, part: slice | tuple[slice, ...]) -> Array:
        spec = self._spec(name)
        try:
            with _opened(self._folder / spec.file) as file:
                array: Array = file.get_slice(spec.name)[part]
        except AttributeError as error:  # NumPy does not know the type
            raise HearthError(
                "model_invalid", f"{name} in {spec.file} has type {spec.dtype}, which is not read",
                name,
            ) from error  # fmt: skip
        return array

    def _spec(self, name: str) -> TensorSpec:
        try:
            return self._specs[name]
        except KeyError as error:
            raise HearthError("model_invalid", f"the model lacks tensor {name}", name) from error


def _read_specs(folder: Path) -> dict[str, TensorSpec]:
    if not (folder / INDEX_FILE).exists():
        return _read_header(folder / SINGLE_FILE)
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HearthError("model_invalid", f"{INDEX_FILE} lacks weight_map", INDEX_FILE)
    files = {_plain(file) for file in weight_map.values()}
    headers = {file: _read_header(folder / file) for file in files}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise HearthError("model_invalid", f"{file} lacks tensor {name}", name)
    return {name: headers[file][name] for name, file in weight_map.items()}


def _plain(file: Any) -> str:
    # The index comes with the model: it may name files beside itself and nothing else.
    if not isinstance(file, str) or Path(file).name != file or file in (".", ".."):
        raise HearthError("model_invalid", f"{INDEX_FILE} names a file outside", INDEX_FILE)
    return file


def _read_header(path: Path) -> dict[str, TensorSpec]:
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        return {
            name: TensorSpec(path.name, tuple(piece.get_shape()), piece.get_dtype(), name)
            for name, piece in slices.items()
        }


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise HearthError(
            "model_invalid", f"the model lacks {path.name}: only safetensors are read", path.name
        )
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise HearthError(
            "model_invalid", f"{path.name} is damaged or cut short", path.name
        ) from error
