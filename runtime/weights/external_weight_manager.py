import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import WEIGHTS_FILE, FileRecord, LLMEngineRunnerConfig
from hearth.runtime.device.device import Device
from hearth.runtime.device.mapped_tensors import DTYPES, map_tensor
from hearth.runtime.errors import HearthError
from hearth.runtime.files import has_digest
from hearth.runtime.known_answer import KnownAnswer, load_answer, parse_answer
from hearth.runtime.tensors.registry import TensorSpec
from hearth.runtime.tensors.tensor import Tensor, TensorMap
from hearth.runtime.weights.weights_file import (
    EMBEDDING,
    WeightEntry,
    WeightLayout,
    WeightsFile,
    load_layout,
    open_weights,
)


class Loaded(NamedTuple):
    """Bytes that were copied into the device's memory, and the time that took."""

    nbytes: int
    seconds: float


class ExternalWeightManager:
    """The weights of an engine that has none itself, mapped from one file.

    An engine of ONNX Runtime reads them as its initializers, and packs them as it would its own
    (`initializers`). Any other binds them: each is loaded into the device's memory once, and
    published once into the engine's TensorMaps. `digest` is that of the file's data.
    """

    def __init__(self, layout: WeightLayout, file: WeightsFile, *, own: bool) -> None:
        self._layout = layout
        self._file = file
        self._own = own
        self._tensors: dict[str, Tensor] = {}
        self.loaded: Loaded | None = None
        """Statistics of `load`; None before, and of an engine that reads the weights itself."""
        self.digest = file.note.sha256
        self.source = file.note.source
        """The name of the model's folder."""

    @classmethod
    def open(
        cls, folder: Path, config: LLMEngineRunnerConfig, path: str = ""
    ) -> "ExternalWeightManager | None":
        """Open the folder's own weights or those of another file; None if the engine has them.

        Raises `weights_invalid` or `engine_corrupt`, naming the file or tensor that does not fit,
        and `unsupported_option` for another file where the engine takes none.
        """
        if not config.external_weight_files or config.backend == "simulated":
            if path:
                raise HearthError(
                    "unsupported_option",
                    "this engine takes no other weights: export it with --external-weights",
                    "weights",
                )
            return None
        layout = load_layout(folder)
        if path:
            return cls(layout, open_weights(Path(path), layout), own=False)
        file = open_weights(folder / WEIGHTS_FILE, layout)
        if file.note.sha256 != layout.own:
            raise HearthError(
                "engine_corrupt",
                f"{WEIGHTS_FILE} holds another model's weights: name such a file as weights, or "
                "export the model again",
                WEIGHTS_FILE,
            )
        return cls(layout, file, own=True)

    def verify(self, read: Callable[[int], None] | None = None) -> None:
        """Compare every byte of the data with the digest, telling those of each piece."""
        path = self._file.path
        if not has_digest(path, self.digest, read, begin=self._layout.begin):
            raise HearthError(
                "weights_invalid",
                f"{path} was changed: write the file again with hearth weights",
                path.name,
            )

    @property
    def record(self) -> FileRecord:
        """Record of the file in the fingerprint of an engine's files."""
        return FileRecord(self._file.nbytes, self.digest)

    @property
    def table(self) -> NDArray[Any]:
        """The embedded form of every token [V, H], mapped."""
        return map_tensor(self._file.path, EMBEDDING)

    @property
    def bound(self) -> bool:
        """True if the engine binds the weights, instead of reading them when it is opened."""
        return self._layout.bound

    @property
    def head(self) -> str:
        """The tensor that gives the logits."""
        return self._layout.head

    @property
    def initializers(self) -> tuple[dict[str, mmap.mmap], dict[str, NDArray[Any]]]:
        """Return what replaces the external data of the graph when an engine is opened.

        The mapped file, unless it is the one beside the graph, and the arrays set for single
        tensors.
        """
        files: dict[str, mmap.mmap] = {}
        if self.bound:
            return files, {}
        if not self._own:
            with self._file.path.open("rb") as file:
                files[WEIGHTS_FILE] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return files, {name: tensor.array for name, tensor in self._tensors.items()}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The bindings of an engine that takes its weights as inputs, none of any other."""
        return tuple(
            TensorSpec(name, "input", DTYPES[entry.dtype], entry.shape)
            for name, entry in self._bindings.items()
        )

    @property
    def _bindings(self) -> dict[str, WeightEntry]:
        return self._layout.taken if self.bound else {}

    def answer(self, config: LLMEngineRunnerConfig) -> KnownAnswer:
        """Return the known answer of the engine with these weights; raises `engine_corrupt`."""
        return parse_answer(self._file.note.answer, config)

    def load(self, device: Device, table: Tensor | None = None) -> None:
        """Load what the engine binds into the device's memory.

        `table` lies there already; an engine that has none, as a draft has, reads none.
        """
        began = time.monotonic()
        if table is not None and EMBEDDING in self._bindings:
            self._tensors.setdefault(EMBEDDING, table)
        wanted = {n: one for n, one in self._bindings.items() if n not in self._tensors}
        if not wanted:
            return
        data = np.memmap(self._file.path, np.uint8, "r")
        arrays = {name: _array(data, entry) for name, entry in wanted.items()}
        self._tensors |= device.constants(arrays)
        size = sum(array.nbytes for array in arrays.values())
        self.loaded = Loaded(size, time.monotonic() - began)

    def publish(self, tensors: TensorMap) -> None:
        """Let an engine's map mean them; raises `internal` for a binding that it has already."""
        known = set(tensors)
        for name in self._bindings:
            if name in known:
                raise HearthError("internal", f"the binding {name} is published twice", name)
            tensors.set(name, self._tensors[name])

    def set_lm_head_weights(self, name: str, tensor: Tensor) -> None:
        """Let other numbers give the logits, in the type and shape of those of the file.

        An engine that binds them gets them in its TensorMaps, any other when it is opened again:
        then `tensor` lies in host memory. Raises `invalid_value` for another name, type or shape,
        and `unsupported_option` where the head is quantised.
        """
        head = self._layout.head
        entry = self._layout.tensors.get(head)
        if name != head:
            raise HearthError(
                "invalid_value", f"the logits of this engine come from {head}, not {name}", name
            )
        if entry is None or entry.dtype in ("I8", "U8"):
            raise HearthError("unsupported_option", "the head of this engine is quantised", name)
        if (tensor.dtype, tensor.shape) != (DTYPES[entry.dtype], entry.shape):
            raise HearthError(
                "invalid_value",
                f"{name} is {tensor.dtype} {tensor.shape}, the engine takes {entry.dtype} "
                f"{entry.shape}",
                name,
            )
        self._tensors[name] = tensor


def _array(data: NDArray[np.uint8], entry: WeightEntry) -> NDArray[Any]:
    """A tensor of a mapped file."""
    flat = np.asarray(data[entry.offset : entry.offset + entry.nbytes])
    return flat.view(DTYPES[entry.dtype]).reshape(entry.shape)


def answer_of(folder: Path, config: LLMEngineRunnerConfig, path: str = "") -> KnownAnswer | None:
    """Return the known answer of an engine with its own weights, or those of another file."""
    weights = ExternalWeightManager.open(folder, config, path) if path else None
    return load_answer(folder, config) if weights is None else weights.answer(config)
