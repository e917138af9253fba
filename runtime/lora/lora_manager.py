"""Layout of an adapter's inputs in one block of memory, and the adapters that are loaded."""

from collections.abc import Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Device
from hearth.runtime.errors import HearthError
from hearth.runtime.lora.adapter import Adapter, Projection, simulated_adapter
from hearth.runtime.lora.stored import read_adapter
from hearth.runtime.tensors.lora import RANK, LoraInput, has_fixed_rank, lora_inputs, slot_rank
from hearth.runtime.tensors.tensor import Tensor, numpy_dtype

_INT = np.dtype(np.int32)
_ALIGNMENT = 256
"""Bytes to a multiple of which every input begins."""


class _Place(NamedTuple):
    first: int
    shape: tuple[int, int]


class BlockLayout:
    """The inputs of an adapter of `rank`, one behind the other, `size` elements in all.

    With `used` these are the inputs of the projections that it names, else all. Where a block
    `tells_rank` the adapter's rank is the first number in it.
    """

    def __init__(
        self,
        inputs: Iterable[LoraInput],
        rank: int,
        dtype: np.dtype[Any],
        used: Collection[Projection] | None = None,
        *,
        tells_rank: bool = False,
    ) -> None:
        self._rank, self._dtype, self._tells_rank = rank, dtype, tells_rank
        self.size = _ALIGNMENT // dtype.itemsize if tells_rank else 0
        self._places: list[tuple[LoraInput, _Place, _Place]] = []
        for pair in inputs:
            if used is None or any((pair.layer, target) in used for target in pair.targets):
                wide, outputs = len(pair.targets) * rank, sum(pair.outputs)
                if pair.transposed:
                    a, b = self._take(wide, pair.inputs), self._take(outputs, rank)
                else:
                    a, b = self._take(pair.inputs, wide), self._take(wide, outputs)
                self._places.append((pair, a, b))

    def filled(self, adapter: Adapter) -> NDArray[Any]:
        """A block with the numbers of an adapter of this rank or a smaller one."""
        block: NDArray[Any] = np.zeros(self.size, self._dtype)
        if self._tells_rank:
            block.view(np.int32)[0] = adapter.rank
        for pair, *places in self._places:
            a, b = (block[first : first + prod(shape)].reshape(shape) for first, shape in places)
            for index, target in enumerate(pair.targets):
                part = adapter.parts.get((pair.layer, target))
                if part is None:
                    continue
                first, rank = index * self._rank, part.a.shape[1]
                if pair.transposed:
                    a[first : first + rank] = part.a.T
                    b[pair.columns[index], :rank] = part.b.T
                else:
                    rows = slice(first, first + rank)
                    a[:, rows], b[rows, pair.columns[index]] = part
        return block

    def tensors(self, block: Tensor) -> dict[str, Tensor]:
        """The inputs in a block, by binding."""
        rank = {RANK: block.beginning(RANK, (1,), _INT)} if self._tells_rank else {}
        return rank | {
            name: block.part(name, *place)
            for pair, a, b in self._places
            for name, place in ((pair.a, a), (pair.b, b))
        }

    def _take(self, *shape: int) -> _Place:
        unit = _ALIGNMENT // self._dtype.itemsize
        place = _Place(self.size, shape)  # type: ignore[arg-type] # two sizes
        self.size += -(-prod(shape) // unit) * unit
        return place


def no_inputs(inputs: Iterable[LoraInput], zeros: Tensor) -> dict[str, Tensor]:
    """All inputs with rank 0, at the address of `zeros`, by binding."""
    return {
        name: zeros.part(name, 0, shape)
        for pair in inputs
        for name, shape in ((pair.a, (pair.inputs, 0)), (pair.b, (0, sum(pair.outputs))))
    }


SLOTS = "/"
"""Key of the tensors into which the active adapter is copied; no adapter's name."""


class _Loaded(NamedTuple):
    digest: str
    block: Tensor
    bindings: Mapping[str, Tensor]


class LoRAManager:
    """The adapters that are loaded, and what steps bind of the active one; "" is none.

    An adapter is one block of memory. Where a step may have any shapes, a switch lets steps bind
    another block, and inputs without numbers have rank 0. Where addresses must stay, on a GPU, all
    inputs lie in slots of the greatest rank, into which a switch copies a block of the same layout
    on the device's stream; none is zeros. Steps of kernels without an adapter bind no slots, so
    that they have graphs of their own.

    `zeros` is the buffer of zeros, at whose address inputs of rank 0 lie.
    """

    def __init__(self, config: LLMEngineRunnerConfig, device: Device, zeros: Tensor) -> None:
        self._config, self._device = config, device
        self._inputs, dtype = lora_inputs(config), numpy_dtype(config.dtype)
        self._loaded: dict[str, _Loaded] = {}
        self._active = ""
        self._slots: Tensor | None = None
        self._free: list[Tensor] = []
        """Blocks of adapters that were unloaded: a GPU's arena frees no single block."""
        self._apart = config.backend == "kernels"
        self._layout = BlockLayout(self._inputs, slot_rank(config), dtype, tells_rank=self._apart)
        self._none = self._fixed = no_inputs(self._inputs, zeros)
        if self._apart:
            self._none[RANK] = zeros.beginning(RANK, (1,), np.dtype(np.int32))
        if self._inputs and (device.kind == "cuda" or has_fixed_rank(config)):
            self._slots = self._new_block("adapter_slots")
            self._fixed = self._layout.tensors(self._slots)
            if not self._apart:
                self._none = self._fixed

    @property
    def active(self) -> str:
        """The name of the adapter that steps run with; "" for none."""
        return self._active

    @property
    def available(self) -> list[str]:
        """The names of those that are loaded."""
        return sorted(self._loaded)

    @property
    def bound(self) -> str:
        """Key of the tensors that steps bind, one of `sets`."""
        if self.rebinds or not self._active:
            return self._active
        return SLOTS if self._apart else ""

    @property
    def sets(self) -> frozenset[str]:
        """Keys that steps may bind: "" (no adapter), and each adapter's, or `SLOTS` if any."""
        if self.rebinds:
            return frozenset(("", *self._loaded))
        return frozenset(("", SLOTS) if self._apart else ("",))

    @property
    def rebinds(self) -> bool:
        """True if a switch binds other tensors."""
        return self._slots is None

    def bindings(self, name: str) -> Mapping[str, Tensor]:
        """Return the tensors of an adapter or `SLOTS`, by binding; raises `adapter_unknown`."""
        if name == SLOTS:
            return self._fixed
        return self._get(name).bindings if name else self._none

    def digest(self, name: str) -> str:
        """A digest of an adapter's numbers, "" for none; raises `adapter_unknown`."""
        return self._get(name).digest if name else ""

    def load(self, name: str, source: Path | Adapter) -> None:
        """Load an adapter from a folder, PEFT's or one that Hearth stored, or one that was read.

        Raises `adapter_invalid`, `unsupported_option`, `out_of_memory`, and `invalid_value` for a
        name that is taken.
        """
        if not name or name in self._loaded:
            raise HearthError("invalid_value", f"there is an adapter {name!r} already", "adapter")
        try:
            self._loaded[name] = self._load(name, source)
        except MemoryError as error:
            what = f"there is no memory for adapter {name}"
            raise HearthError("out_of_memory", what, "adapter") from error

    def _load(self, name: str, source: Path | Adapter) -> _Loaded:
        adapter = self._read(name, source) if isinstance(source, Path) else source
        if self._slots is not None:
            numbers = self._layout.filled(adapter)
            block = self._free.pop() if self._free else self._new_block(f"adapter {name}")
            self._device.put(block, numbers)
            return _Loaded(adapter.digest, block, self._fixed)
        dtype = numpy_dtype(self._config.dtype)
        layout = BlockLayout(self._inputs, adapter.rank, dtype, adapter.parts)
        block = Tensor(f"adapter {name}", layout.filled(adapter))
        bindings = {**self._none, **layout.tensors(block)}
        return _Loaded(adapter.digest, block, bindings)

    def reserve(self) -> None:
        """Take the memory of an adapter that will be loaded; only slots need it beforehand."""
        if not self.rebinds:
            self._free.append(self._new_block("adapter"))

    def unload(self, name: str) -> None:
        """Forget an adapter, which is not active; raises `adapter_unknown` and `internal`."""
        block = self._get(name).block
        if name == self._active:
            raise HearthError("internal", f"adapter {name} is active", "adapter")
        del self._loaded[name]
        if not self.rebinds:
            self._free.append(block)

    def switch(self, name: str) -> None:
        """Let the next steps run with an adapter, or "" none; raises `adapter_unknown`."""
        block = self._get(name).block if name else None
        if self._slots is not None and name != self._active:
            self._device.copy(self._slots, block)
        self._active = name

    def _read(self, name: str, folder: Path) -> Adapter:
        if self._config.backend == "simulated" and self._config.max_supported_lora_rank:
            return simulated_adapter(name, self._config)
        return read_adapter(folder, self._config)

    def _get(self, name: str) -> _Loaded:
        try:
            return self._loaded[name]
        except KeyError as error:
            raise HearthError(
                "adapter_unknown", f"there is no adapter {name}", "adapter"
            ) from error

    def _new_block(self, name: str) -> Tensor:
        return self._device.zeros(name, (self._layout.size,), numpy_dtype(self._config.dtype))
