"""What the runtime asks of a device: memory, one stream, and the ops around an engine.

The NumPy forms in `runtime.device.arrays` and `runtime.sampling` specify every op.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.device.arrays import RowMove
from runtime.device.stream import Stream
from runtime.request import RowRequest
from runtime.sampling.batch import Sample
from runtime.tensors.tensor import Tensor

DeviceKind = Literal["cpu", "cuda"]


class StepBuffers(NamedTuple):
    """The inputs of a step; integers of an index are int64 (native) or int32 (classic)."""

    table: Tensor
    """[V, H]: the embedded form of every token."""
    next_tokens: Tensor
    """[max batch] int32: the newest token of each row, written by the sampler."""
    embeds: Tensor
    """[max batch, prefill chunk, H]: `inputs_embeds`."""
    positions: Tensor
    """[max batch, prefill chunk] index: `attention_pos_id`."""
    select: Tensor
    """[max batch, 1] index: `last_token_ids`."""
    start: Tensor
    """[max batch] index: filled cache slots of each row, `kvcache_start_index`."""


class StepOps(Protocol):
    """Fills the inputs of a step; work is queued on the device's stream."""

    def feed_prefill(
        self, buffers: StepBuffers, token_ids: NDArray[np.int64], lengths: Sequence[int]
    ) -> None:
        """Embeds `token_ids` [B, S], positions from each row's start, the last token selected.

        `lengths` counts the tokens of each row; positions of padding are 0.
        """

    def feed_decode(self, buffers: StepBuffers, rows: int) -> None:
        """Embeds the newest token of each of `rows` rows, its position, token 0 selected.

        A token below 0, of a row that failed, counts as token 0.
        """

    def set_lengths(self, start: Tensor, lengths: Sequence[int]) -> None:
        """Write the filled slots of the first rows, and 0 for all others."""

    def advance(self, start: Tensor, rows: int) -> None:
        """Count one more filled slot in each of the first `rows`."""


class CacheStorage(Protocol):
    """The K/V buffers of all layers, keys and values alike, as dense [rows, heads, slots, D]."""

    def write(self, fresh: Sequence[Tensor], start: Tensor, shape: tuple[int, int, int]) -> None:
        """Classic dialect: put new rows, one tensor [B, heads, S, D] a buffer, from `start` on.

        `shape` is (B, S, slots).
        """

    def move(self, moves: Sequence[RowMove], slots: tuple[int, int]) -> None:
        """Apply `move_rows` to every buffer, from the first to the second number of slots."""

    def zero_row(self, row: int, slots: int) -> None:
        """Zero a row of every buffer."""

    def read_row(self, row: int, length: int, slots: int) -> list[NDArray[Any]]:
        """Copies of the first slots of a row, [heads, length, D] a buffer, on the host."""

    def write_row(self, row: int, arrays: Sequence[NDArray[Any]], slots: int) -> None:
        """The inverse of `read_row`."""


class PendingSamples(Protocol):
    """Tokens that the device may still be picking."""

    def result(self) -> list[Sample | None]:
        """Wait for the sampled rows, in their order; None where numbers were not finite.

        A row that was only checked has a sample of token -1. Raises what the step raised.
        """


class BatchSampler(Protocol):
    """Picks the tokens of a batch and owns the rows' histories; rows are those of the engine.

    A row's position, on which its random number depends, is the number of its filled slots.
    """

    def begin(self, rows: Sequence[RowRequest]) -> None:
        """Take the settings and histories of a new batch."""

    def sample(self, rows: int, waiting: int = 0) -> PendingSamples:
        """Pick from the logits of rows `waiting` to `rows`, and append to their histories.

        Picked tokens become the rows' `next_tokens`. The first `waiting` rows still have prompt
        left: their logits are only checked.
        """

    def compact(self, mapping: Sequence[int]) -> None:
        """Apply an eviction: row i becomes row `mapping[i]`, or leaves when that is -1."""


class SamplerBuffers(NamedTuple):
    """What a sampler reads and writes."""

    logits: Tensor
    """[max batch, 1, V] float32."""
    start: Tensor
    """[max batch] index: filled slots, the position of the token to pick."""
    next_tokens: Tensor
    """[max batch] int32."""


class Device(Protocol):
    """One device; all work goes to one stream, in order."""

    @property
    def kind(self) -> DeviceKind:
        """Which kind of device this is."""

    @property
    def stream(self) -> Stream:
        """The stream of all work."""

    @property
    def ops(self) -> StepOps:
        """What fills the inputs of a step."""

    @property
    def steps_ahead(self) -> int:
        """Steps that the host may queue before it reads the tokens of the first of them."""

    def zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Zeroed memory; raises `out_of_memory` naming the tensor."""

    def constant(self, name: str, array: NDArray[Any]) -> Tensor:
        """Memory with the contents of `array`; on the CPU it is `array` itself."""

    def cache_storage(self, buffers: Sequence[Tensor], heads: int, head_dim: int) -> CacheStorage:
        """The moves and writes of these K/V buffers."""

    def batch_sampler(self, buffers: SamplerBuffers) -> BatchSampler:
        """A sampler over these buffers."""

    def close(self) -> None:
        """Free all memory of the device."""
