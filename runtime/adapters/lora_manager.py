from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime.adapters.adapter import Adapter
from runtime.adapters.block import BlockLayout, no_inputs
from runtime.adapters.simulated import simulated_adapter
from runtime.adapters.stored import read_adapter
from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device
from runtime.errors import HearthError
from runtime.tensors.dtypes import numpy_dtype
from runtime.tensors.lora import RANK, has_fixed_rank, lora_inputs, slot_rank
from runtime.tensors.tensor import Tensor

SLOTS = "/"
"""Whose tensors steps bind where those of an adapter, whichever it is, are copied; no name."""


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
        """Blocks of adapters that were unloaded: a GPU's memory is given back by no one."""
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
        """Whose tensors steps bind, one of `sets`."""
        if self.rebinds or not self._active:
            return self._active
        return SLOTS if self._apart else ""

    @property
    def sets(self) -> frozenset[str]:
        """What steps may bind: nobody's and each adapter's, or slots instead, or these alone."""
        if self.rebinds:
            return frozenset(("", *self._loaded))
        return frozenset(("", SLOTS) if self._apart else ("",))

    @property
    def rebinds(self) -> bool:
        """Whether a switch binds other tensors."""
        return self._slots is None

    def bindings(self, name: str) -> Mapping[str, Tensor]:
        """What a step binds with an adapter or `SLOTS`, by binding; raises `adapter_unknown`."""
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
