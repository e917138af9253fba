import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.config import LLMEngineRunnerConfig, RopeConfig
from hearth.runtime.device.device import Stream
from hearth.runtime.executor.engine import Binding, IOTensor, SelfContained
from hearth.runtime.packages import VERSION
from hearth.runtime.tensors.lora import lora_targets
from hearth.runtime.tensors.profiles import PROFILE_CONTEXT
from hearth.runtime.tensors.registry import TensorRegistry

HOT_LOGIT = 100.0
"""Logit of the next token beside zeros: rows that sample follow the stream as well."""
_READ = ("inputs_embeds", "attention_pos_id", "last_token_ids", "logits")


def simulated_next_tokens(
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    vocab_size: int,
    eos_token_ids: Sequence[int],
    shift: int = 0,
) -> NDArray[np.int64]:
    """The token after `token_ids` [B] at `positions` [B] (counted from 0), never an end token.

    With u tokens that are no end tokens, it is the one of rank (31 id + 17 position + 7 + shift)
    mod u.
    """
    ends = sorted({token for token in eos_token_ids if token < vocab_size})
    chosen = (31 * token_ids + 17 * positions + 7 + shift) % (vocab_size - len(ends))
    for end in ends:
        chosen += chosen >= end
    return chosen


def simulated_config(
    *,
    vocab_size: int = 512,
    layers: int = 12,
    max_batch: int = 8,
    capacity: int = 2048,
    step_ms: float = 0.0,
    prefill_us: float = 0.0,
    eos_token_ids: tuple[int, ...] = (0,),
    prefill_chunk: int = 256,
) -> LLMEngineRunnerConfig:
    """The configuration of a simulated engine."""
    return LLMEngineRunnerConfig(
        hearth_version=VERSION,
        backend="simulated",
        dialect="native",
        architecture="simulated",
        dtype="float32",
        kv_cache_dtype="float32",
        rope_config=RopeConfig(type="none"),
        num_decoder_layers=layers,
        num_attention_layers=layers,
        num_attention_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rotary_dim=2,
        hidden_size=1,
        intermediate_size=1,
        max_supported_batch_size=max_batch,
        max_supported_input_length=capacity - 1,
        max_kv_cache_capacity=capacity,
        prefill_chunk=prefill_chunk,
        vocab_size=vocab_size,
        output_vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        step_ms=step_ms,
        prefill_us=prefill_us,
    )


def as_simulated(
    config: LLMEngineRunnerConfig, step_ms: float, prefill_us: float = 0.0
) -> LLMEngineRunnerConfig:
    """The same vocabulary, limits and end tokens with a simulated engine behind them."""
    made = simulated_config(
        step_ms=step_ms, prefill_us=prefill_us, layers=config.num_decoder_layers
    )
    kept = (
        "hearth_version",
        "max_supported_batch_size",
        "max_supported_input_length",
        "max_kv_cache_capacity",
        "prefill_chunk",
        "vocab_size",
        "output_vocab_size",
        "eos_token_ids",
        "bos_token_id",
        "files",
        "max_supported_lora_rank",
    )
    made = structs.replace(made, **{name: getattr(config, name) for name in kept})
    return structs.replace(made, lora_targets=lora_targets(made))


class SimulatedEngine(SelfContained):
    """Steps of `config.step_ms` milliseconds whose tokens `simulated_next_tokens` defines.

    A prefill step takes `config.prefill_us` microseconds more for each token of every row, with
    the padding.
    It replaces a model in benches and fault tests: all bindings of a decoder, no weights.
    """

    def __init__(self, config: LLMEngineRunnerConfig, registry: TensorRegistry) -> None:
        self.io_tensors = tuple(
            IOTensor(spec.name, spec.direction, spec.dtype, spec.shape)
            for spec in (*registry.specs, *registry.own_specs)
        )
        self._config = config
        self._profile = PROFILE_CONTEXT
        # See `hearth.runtime.lora.adapter`.
        self._adapter = f"lora_b_{config.lora_targets[0]}_0" if config.lora_targets else ""
        self._read = {*_READ, self._adapter}

    def use_profile(self, profile: int, _stream: Stream, /) -> None:
        """Simulate the time of this profile's steps from now on."""
        self._profile = profile

    def run(self, bindings: Sequence[Binding], stream: Stream) -> None:
        """Write one-hot logits for each selected token and take the time of a step."""
        self.capture(bindings, stream).launch(stream)

    def capture(self, bindings: Sequence[Binding], _stream: Stream) -> "SimulatedRun":
        """Keep the arrays of a step."""
        read = (one for one in bindings if one.name in self._read)
        arrays = {one.name: one.tensor.view(one.shape) for one in read}
        seconds = self._config.step_ms / 1e3
        if self._profile == PROFILE_CONTEXT:
            seconds += arrays["attention_pos_id"].size * self._config.prefill_us / 1e6
        return SimulatedRun(self._config, arrays, arrays.get(self._adapter), seconds)

    def close(self) -> None:
        """Do nothing."""


class SimulatedRun:
    """One step over fixed arrays that takes `seconds`."""

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        arrays: dict[str, NDArray[Any]],
        adapter: NDArray[Any] | None,
        seconds: float,
    ) -> None:
        self._config = config
        self._seconds = seconds
        self._embeds = arrays["inputs_embeds"]
        self._positions = arrays["attention_pos_id"]
        self._last = arrays["last_token_ids"]
        self._logits = arrays["logits"]
        self._adapter = adapter
        self._rows = np.arange(self._last.shape[0])[:, None]
        self._places = np.arange(self._last.shape[1])

    def launch(self, _stream: Stream) -> None:
        """Run the step on the calling thread."""
        deadline = time.monotonic() + self._seconds
        rows, last = self._rows, self._last
        chosen = simulated_next_tokens(
            self._embeds[rows, last, 0].astype(np.int64),
            self._positions[rows, last],
            self._config.vocab_size,
            self._config.eos_token_ids,
            0 if self._adapter is None or not self._adapter.size else int(self._adapter[0, 0]),
        )
        self._logits.fill(0.0)
        self._logits[rows, self._places, chosen] = HOT_LOGIT
        remaining = deadline - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)

    def close(self) -> None:
        """Do nothing: the arrays are the caller's."""
