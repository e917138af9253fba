"""Interface of a device: memory, one stream, and the ops around an engine.

The NumPy forms in `hearth.runtime.reference.ops` and `hearth.runtime.sampling` specify every op.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder
from hearth.runtime.config import DeviceKind
from hearth.runtime.device.cache_storage import CacheStorage
from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.positions import RowPositions
from hearth.runtime.request import RowToken
from hearth.runtime.sampling import TokenMasks
from hearth.runtime.tensors.tensor import Tensor


class Stream(Protocol):
    """An ordered queue of device work."""

    @property
    def handle(self) -> int:
        """The device library's own handle (`CUstream`) as an integer; 0 on the CPU."""

    def synchronize(self) -> None:
        """Return when all queued work has ended; raises the error of that work."""


class StreamEvent(Protocol):
    """Event of the stream: a point between its works."""

    def query(self) -> bool:
        """Return True if all work before the event has ended; raises the error of that work."""

    def wait(self) -> None:
        """Return when all work before the event has ended; raises the error of that work."""


class Span(Protocol):
    """Work that is queued from the start of the span to its `end`."""

    def end(self) -> None:
        """End the span: work that is queued from now on is not part of it."""

    @property
    def seconds(self) -> float | None:
        """Seconds of the device for the span; None until its end. Raises the error of the work."""


class CapturedStep(Protocol):
    """Captured work; its holder must close it before the buffers that the work uses."""

    def launch(self, stream: Stream, /) -> None:
        """Queue the work with one launch."""

    def close(self) -> None:
        """Free the captured work."""


class HostStream:
    """The CPU's stream: work runs on the calling thread, so nothing is ever pending."""

    handle = 0

    def synchronize(self) -> None:
        """Return at once: work has ended when the call that started it returns."""


class PendingSamples(Protocol):
    """Tokens that the device may still be sampling."""

    def result(self) -> list[RowToken | None]:
        """Wait for the sampled rows, in their order; None for a row whose numbers are not finite.

        A row that was only checked has a sample of token -1. Raises the error of the step.
        """


class CapturedSampler(Protocol):
    """Sampling captured with decode steps; it advances the filled slots of its rows."""

    def expect(self, rows: int) -> None:
        """Sample the first `rows` from the next launch on; the others are padding."""

    def queue(self, rows: int) -> None:
        """Queue, for a capture, sampling of a step of at most `rows` rows.

        It samples as `BatchSampler.sample`, and counts one more filled slot for a sampled row.
        """

    def samples(self) -> PendingSamples:
        """Return the samples of the launch that was queued last; call it once for each launch."""


class RotaryTables(NamedTuple):
    """Rotary tables of every row, and their sources; R counts rotated pairs."""

    cos_of: Tensor
    """[positions, R] float32."""
    sin_of: Tensor
    """As `cos_of`."""
    axes: Tensor
    """[R] int32: the axis of a position that each pair is rotated by."""
    cos: Tensor
    """[max batch, slots, R] float32, the name of the binding."""
    sin: Tensor
    """As `cos`."""


class ImageOps(Protocol):
    """Ops for images around a step, queued on the device's stream."""

    def splice(self, target: Tensor, place: int, rows: NDArray[Any]) -> None:
        """Write `rows` [n, H] into a buffer [.., H], read flat, from row `place` on.

        `rows` has been read when the call returns. Raises `internal` if they do not fit.
        """

    def clear(self, target: Tensor, places: int) -> None:
        """Zero the first `places` rows of a buffer [.., H] that is read flat."""

    def fill_rotary(self, tables: RotaryTables, row: int, positions: RowPositions) -> None:
        """Fill the tables of a row, whose tokens are at `positions`, in all of its slots."""


def check_splice(target: Tensor, place: int, rows: NDArray[Any]) -> None:
    """Raise `internal` if embeddings have another type or width, or exceed the buffer."""
    size = target.shape[-1]
    fits = rows.ndim == 2 and rows.shape[1] == size and rows.dtype == target.dtype  # noqa: PLR2004 - rows and H
    if not fits or place < 0 or (place + len(rows)) * size * rows.itemsize > target.nbytes:
        raise HearthError(
            "internal",
            f"embeddings {rows.dtype} {rows.shape} do not fit into {target.name} at {place}",
            target.name,
        )


MOST_GPU_ROWS = 256
"""Rows of a batch that the kernels of a GPU take."""


class StepBuffers(NamedTuple):
    """The inputs of a step, whose names are those of the engine's bindings, and their sources.

    S is the longest step, a prefill chunk or a tree; N the most tokens of a row that get logits.
    Integers of an index are int64 (native) or int32 (classic).
    """

    embedding: Tensor
    """[V, H]: the embedded form of every token."""
    next_tokens: Tensor
    """[max batch] int32: the newest token of each row, written by the sampler."""
    inputs_embeds: Tensor
    """[max batch, S, H], the engine's type."""
    attention_pos_id: Tensor
    """[max batch, S] index: the position of each token."""
    last_token_ids: Tensor
    """[max batch, N] index: the tokens of each row that get logits."""
    lengths: Tensor
    """[max batch] index: filled cache slots of each row; bound as `kvcache_start_index`."""
    tree_mask: Tensor | None = None
    """[max batch, S, S] bool: the tokens of the step that each sees; None for a causal engine."""
    packed_mask: Tensor | None = None
    """[max batch, S, ceil(S / 32)] int32: bit j % 32 of word j // 32: the token sees token j.

    An engine of kernels takes it in place of the bool mask.
    """


class TreeBuffers(NamedTuple):
    """Token trees, one a row; N is the largest tree: `reference.token_trees` has rules."""

    ids: Tensor
    """[max batch, N] int32: the token of each node; node 0 is the row's newest token."""
    parents: Tensor
    """[max batch, N] int32: a node before it; -1 for node 0, -2 where there is no node."""


class ProposalBuffers(NamedTuple):
    """Buffers of a draft engine's proposal beside its step buffers.

    K tokens are proposed after a node; the proposal tree has P = K * T slots and the table
    D = 1 + K + (T - 1) * K * K entries; entry 0 is the root.
    """

    logits: Tensor
    """[max batch, K, draft vocabulary] float32: log-probabilities of the last draft step."""
    hidden_states: Tensor
    """[max batch, K, H]: hidden states of the same tokens."""
    hidden_states_from_draft: Tensor
    """[max batch, P, H]: input of each slot."""
    full_ids: Tensor | None
    """[draft vocabulary] int32: the base's id of each draft id; None where they are the same."""
    ids: Tensor
    """[max batch, P] int32: the token of each slot of the proposal tree."""
    parents: Tensor
    """[max batch, P] int32: the parent's slot, -1 for a child of the root, -2 for none yet."""
    entries: Tensor
    """[max batch, P] int32: the table entry of each slot."""
    table_ids: Tensor
    """[max batch, D] int32."""
    table_parents: Tensor
    """[max batch, D] int32: the parent's entry, -1 for the root."""
    table_scores: Tensor
    """[max batch, D] float32: the sum of log-probabilities from the root."""


class ChainBuffers(NamedTuple):
    """Buffers of a draft engine's chain: each level's token is a node and the next step's input."""

    step: StepBuffers
    """Buffers of steps of one token; their `lengths` are the draft's filled slots."""
    logits: Tensor
    """[max batch, 1, draft vocabulary] float32, of the last draft step."""
    hidden_states: Tensor
    """[max batch, 1, H]: hidden states of the same token."""
    hidden_states_from_draft: Tensor
    """[max batch, 1, H]: input of the next step."""
    full_ids: Tensor | None
    """[draft vocabulary] int32: the base's id of each draft id; None where they are the same."""
    trees: TreeBuffers
    """Token trees that get the tokens."""
    lengths: Tensor
    """[max batch] index: the base's filled slots, the position of the first token."""


class PathShape(NamedTuple):
    """The sizes of a round's paths as entries of a draft.

    Trees of `width` nodes in `rows` rows become `entries` a row of a step of `batch` rows.
    """

    rows: int
    batch: int
    entries: int
    width: int


class AcceptedPath(NamedTuple):
    """Accepted samples of a row in a round, and the node behind which each was sampled."""

    samples: list[RowToken]
    nodes: list[int]


class PendingPaths(Protocol):
    """Walks through trees that the device may still be at."""

    def result(self) -> list[AcceptedPath | None]:
        """Wait for the rows' paths; None if the root is not finite. Raises the error of the step.

        The history and newest token of a row without a path are as before the round.
        """


class StepOps(Protocol):
    """Ops that fill the inputs of a step, queued on the device's stream."""

    def feed_prefill(
        self,
        buffers: StepBuffers,
        token_ids: NDArray[np.int64],
        lengths: Sequence[int],
        first: Sequence[int] | None = None,
    ) -> None:
        """Feed `token_ids` [B, S], positions from each row's start, the last token selected.

        `lengths` counts the tokens of each row; positions of padding are 0. `first` gives each
        row's first position where that is not its start. The mask, if there is one, is causal.
        """

    def put_entries(
        self,
        buffers: StepBuffers,
        token_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
        first: Sequence[int],
        places: Sequence[Sequence[int]],
        *,
        filled: Sequence[int],
    ) -> None:
        """Bring entries of a draft's cache [B, S] to where `feed_entries` finds them.

        Arguments are as in `feed_prefill`, but a row without entries may have length 0. `filled`
        counts the slots before the entries, and `places` [B, S] are the places of their hidden
        states, -1 for zeros. A device may read the entries when it feeds them: wait for that before
        the next call.
        """

    def enter_paths(
        self, buffers: StepBuffers, paths: PendingPaths, lengths: Tensor, shape: PathShape
    ) -> None:
        """Put the entries of paths that queued walks will find, behind the entries put last.

        `lengths` [max batch] are the base's filled slots. A device whose host waits for all work
        raises `internal`: there the host can put the entries itself.
        """

    def feed_entries(
        self,
        buffers: StepBuffers,
        source: Tensor,
        out: Tensor,
        grown: Tensor,
        shape: tuple[int, int],
    ) -> None:
        """Feed the newest entries as a prompt; `out` [B, S, W] gets their rows of `source`.

        `shape` is (B, S); `source` [.., W] is read flat. The step's own start becomes the slots
        filled before the entries, and `grown` [max batch] the slots filled with them.
        """

    def feed_decode(self, buffers: StepBuffers, rows: int) -> None:
        """Feed the newest token of each of `rows` rows and its position, token 0 selected.

        A token below 0, of a row that failed, counts as token 0.
        """

    def set_lengths(self, start: Tensor, lengths: Sequence[int]) -> None:
        """Write the filled slots of the first rows, and 0 for all others."""

    def advance(self, start: Tensor, rows: int) -> None:
        """Count one more filled slot in each of the first `rows`."""


class TreeOps(Protocol):
    """Ops that build token trees and the steps around them, queued on the device's stream."""

    def upload_tree(
        self, trees: TreeBuffers, ids: NDArray[np.int32], parents: NDArray[np.int32]
    ) -> None:
        """Write trees [rows, width] that were made on the host; node 0 may hold any id."""

    def feed_verify(self, buffers: StepBuffers, trees: TreeBuffers, rows: int, width: int) -> None:
        """Fill a step of the first `width` nodes of each row; node 0 gets `next_tokens`.

        Mask (of the form that is bound), positions (start + depth, 0 where there is no node),
        embeddings (of token 0 where there is no node), and every node selected.
        """

    def begin_proposal(self, proposal: ProposalBuffers, rows: int, top_k: int) -> None:
        """Table and first K slots from logits [rows, 1, Vd] and hidden [rows, 1, H]."""

    def feed_proposal(
        self,
        buffers: StepBuffers,
        proposal: ProposalBuffers,
        lengths: Tensor,
        shape: tuple[int, int, int],
    ) -> None:
        """Fill a draft step of all P slots, of which `used` are there; the newest K are selected.

        `shape` is (rows, used, K). Slots that are not there see nothing and have token and
        position 0. `lengths` [max batch] index are the base's filled slots, the position of the
        root's children. A slot sees its ancestors and itself.
        """

    def extend_proposal(
        self, proposal: ProposalBuffers, rows: int, top_k: int, level: int, *, last: bool
    ) -> None:
        """Enter the K * K tokens after the newest K slots, slots `level` * K on, into the table.

        Unless it is the last level, the best K of them become the next K slots; each gets the
        hidden output of its parent.
        """

    def finish_proposal(
        self, proposal: ProposalBuffers, trees: TreeBuffers, speculating: Sequence[bool], width: int
    ) -> None:
        """Make each table's best `width` entries a tree; node 0 alone unless speculating."""

    def draft_chain(self, chain: ChainBuffers, rows: int, nodes: int, level: int) -> None:
        """The best tokens by logits [rows, 1, Vd] as node `level` + 1 of each row's tree.

        Trees are [rows, nodes]. Unless it is the last node, its draft step is fed: embedding,
        position (the base's filled slots + level), hidden state, and from level 1 on one more
        filled slot. A logit that is not a number counts as the lowest.
        """

    def gather_rows(
        self, source: Tensor, width: int, index: NDArray[np.int32], out: Tensor
    ) -> None:
        """`out[b, i] = source[b, index[b, i]]`, zeros where the index is negative.

        `index` is [rows, n]; source and out are used as dense [rows, width, H] and [rows, n, H].
        """


class BatchSampler(Protocol):
    """Sampler of a batch; owner of the rows' histories, by their places.

    A row's position, on which its random number depends, is the number of its filled slots.
    """

    @property
    def captured_sampler(self) -> CapturedSampler | None:
        """Sampling of a decode step as part of its capture; None if it is not captured."""

    def reorder(self, reorder: BatchReorder) -> None:
        """Let rows move with settings, histories and newest tokens; take settings of new rows."""

    def sample(
        self,
        rows: int,
        first: int = 0,
        picked: int | None = None,
        masks: TokenMasks = (),
    ) -> PendingSamples:
        """Sample from the first `picked` (None: all) of `rows` logits, and append to the histories.

        Row i of the logits is place `first` + i. Sampled tokens become the `next_tokens`. The rows
        behind still have prompt left: their logits are only checked. `masks` are those of the
        picked rows, read when the call returns; only a row whose options have a grammar has one.
        """

    def verify(self, rows: int, width: int, masks: Sequence[TokenMasks] = ()) -> PendingPaths:
        """Walk each row's tree by the logits [rows, width, V] of its nodes.

        At a node of depth d the token is sampled for position start + d + 1 with the row's history
        and the tokens of the walk so far; a child with that token is the next node (the first of
        equal ones). All sampled tokens enter the history, the last becomes the `next_tokens`, and
        the row's `lengths` grow by as many. `masks` has for each row those of its first nodes, none
        for a row without; such a walk ends before a node that has none.
        """


class SamplerBuffers(NamedTuple):
    """Buffers that a sampler reads and writes."""

    logits: Tensor
    """[max batch, N, V] float32; N is 1 without speculation."""
    lengths: Tensor
    """[max batch] index: filled slots, the position of the token to sample."""
    next_tokens: Tensor
    """[max batch] int32."""
    trees: TreeBuffers | None = None
    """The trees that `verify` walks."""


class Device(Protocol):
    """One device; all work goes to one stream, in order."""

    @property
    def kind(self) -> DeviceKind:
        """Kind of the device."""

    @property
    def stream(self) -> Stream:
        """The stream of all work."""

    @property
    def ops(self) -> StepOps:
        """Ops that fill the inputs of a step."""

    @property
    def tree_ops(self) -> TreeOps:
        """Ops that build token trees and the steps around them."""

    @property
    def image_ops(self) -> ImageOps:
        """Ops for images around a step."""

    @property
    def steps_ahead(self) -> int:
        """Steps that the host may queue before it reads the tokens of the first of them."""

    def zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Zeroed memory; raises `out_of_memory` naming the tensor."""

    def host_zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Zeroed host memory that the device reads and writes by itself; raises as `zeros`."""

    def transfer(self, source: Tensor, target: Tensor) -> None:
        """Copy a buffer into another of the same size, each in device memory or of `host_zeros`.

        It is queued on the stream.
        """

    def constant(self, name: str, array: NDArray[Any]) -> Tensor:
        """Memory with the contents of `array`; on the CPU it is `array` itself."""

    def constants(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """Make a `constant` of each array, by name, as fast as large arrays can be copied."""

    def put(self, target: Tensor, array: NDArray[Any]) -> None:
        """Write a host array, which has been read when this returns, into a buffer of its size."""

    def copy(self, target: Tensor, source: Tensor | None) -> None:
        """Queue a copy of a buffer, or of zeros, into another of its size."""

    def cache_storage(self, buffers: Sequence[Tensor], heads: int, head_dim: int) -> CacheStorage:
        """The storage of these K/V buffers, with its moves and writes."""

    def batch_sampler(self, buffers: SamplerBuffers) -> BatchSampler:
        """A sampler over these buffers."""

    def record_event(self) -> StreamEvent:
        """Record an event behind all queued work; the last recorded event is void."""

    def span(self) -> Span:
        """The beginning of a span; there may be any number of them."""

    def fetch(self, source: Tensor, out: NDArray[Any]) -> None:
        """Copy the beginning of a buffer, whose work has ended, into a dense host array.

        It does not wait for work that was queued since.
        """

    def free_memory(self) -> int | None:
        """Free bytes of the device's own memory; None if it shares the host's memory."""

    def record(self, work: Callable[[], None]) -> CapturedStep | None:
        """Capture the launches of `work`, which runs once before; None if it queues none."""

    def close(self) -> None:
        """Free all memory of the device."""
