from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.caches.buckets import bucket_sizes
from runtime.caches.hybrid_cache_manager import HybridCacheManager
from runtime.config import LLMEngineRunnerConfig
from runtime.device.cpu import fill_positions, slot_index, write_rows
from runtime.device.stream import Stream
from runtime.errors import HearthError
from runtime.executor.engine_executor import EngineExecutor
from runtime.pipeline_io import PipelineIO, build_tensor_map
from runtime.shared_resources import SharedResources
from runtime.tensors.dims import PROFILE_CONTEXT, PROFILE_GENERATION, InferenceDims
from runtime.tensors.tensor import Tensor
from runtime.tensors.tensor_map import TensorMap

Logits = NDArray[np.float32]


class _DecodeViews(NamedTuple):
    embeds: NDArray[Any]
    positions: NDArray[Any]
    select: NDArray[Any]
    start: NDArray[Any]
    logits: Logits


class LLMEngineRunner:
    """Runs the steps of one decoder: the one place that fills step inputs.

    Rows of a step are the first rows of the batch. Returned logits [rows, V] are a view of the
    step buffer and hold until the next step.
    """

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        executor: EngineExecutor,
        io: PipelineIO,
        resources: SharedResources,
        stream: Stream,
    ) -> None:
        self._config = config
        self._executor = executor
        self._io = io
        self._resources = resources
        self._caches = resources.cache_managers[0]
        self._stream = stream
        self._decode_views: dict[int, _DecodeViews] = {}
        self._tensors = TensorMap()
        build_tensor_map(self._tensors, io, resources)

    def get_engine_config(self) -> LLMEngineRunnerConfig:
        """The configuration that the engine runs with."""
        return self._config

    def get_kv_cache(self) -> HybridCacheManager:
        """The caches of this engine and the lengths of its rows."""
        return self._caches

    def get_rope_cos_sin_tensors(self) -> tuple[Tensor, ...]:
        """The rotary tables as bound; none for an engine that has none."""
        return self._resources.rope

    @property
    def executor(self) -> EngineExecutor:
        """The executor, for counters and introspection."""
        return self._executor

    def reset(self, batch: int) -> None:
        """Begin a batch of `batch` empty rows."""
        self._caches.reset(batch)

    def execute_prefill_step(self, token_ids: NDArray[np.int64], lengths: Sequence[int]) -> Logits:
        """Run the next chunk of the first rows' prompts and return the last tokens' logits.

        `token_ids` [rows, S] is padded at the right to the longest chunk; `lengths` counts the
        tokens of each row. All rows must start at the same slot.
        """
        rows, width = token_ids.shape
        caches, io = self._caches, self._io
        starts = set(caches.row_lengths[:rows])
        if len(starts) != 1:
            raise HearthError("internal", "rows of a prefill step must start at the same slot")
        caches.reserve(starts.pop() + width)
        counts = io.host_context_lengths.view((rows,))
        counts[:] = lengths
        positions = io.position_ids.view((rows, width))
        fill_positions(positions, caches.lengths.array[:rows], counts)
        np.subtract(counts, 1, out=io.select_token_indices.view((rows, 1))[:, 0])
        dims = InferenceDims.prefill(rows, width, caches.kv.bucket)
        embeds = io.inputs_embeds.view((rows, width, self._config.hidden_size))
        self._resources.embedding.look_up(token_ids, embeds)
        self._run(PROFILE_CONTEXT, dims)
        caches.commit(lengths)
        logits: Logits = io.output_logits.view((rows, self._config.output_vocab_size))
        return logits

    def execute_vanilla_decoding_step(self, token_ids: NDArray[np.int64]) -> Logits:
        """Run one token of every live row, [rows] ids, and return the logits."""
        rows = token_ids.shape[0]
        caches = self._caches
        if rows != caches.batch:
            raise HearthError("internal", "a decode step takes all live rows")
        caches.reserve(max(caches.row_lengths) + 1)
        views = self._views_of_decode(rows)
        views.positions[:] = views.start
        views.select[:] = 0
        self._resources.embedding.look_up(token_ids, views.embeds)
        self._run(PROFILE_GENERATION, InferenceDims.decode(rows, caches.kv.bucket))
        caches.commit([1] * rows)
        return views.logits

    def capture_vanilla_decoding_graph(self, batch_sizes: Iterable[int]) -> None:
        """Capture the decode step of each batch size in every bucket.

        Call it between batches: a capture may run the step, which writes into the caches.
        """
        buckets = bucket_sizes(self._caches.kv.capacity)
        for batch in batch_sizes:
            for bucket in buckets:
                self._prepare(PROFILE_GENERATION, InferenceDims.decode(batch, bucket))
                self._executor.capture_graph(self._stream)
        self._caches.reset(0)
        self._prepare(PROFILE_GENERATION, InferenceDims.reset(buckets[0]))

    def close(self) -> None:
        """Free captured graphs and the engine."""
        self._executor.close()

    def _prepare(self, profile: int, dims: InferenceDims) -> None:
        self._executor.prepare(profile, dims, self._tensors, self._stream)

    def _run(self, profile: int, dims: InferenceDims) -> None:
        self._prepare(profile, dims)
        self._executor.execute(self._stream)
        if self._io.new_keys:
            self._write_new_rows(dims)

    def _views_of_decode(self, rows: int) -> "_DecodeViews":
        """The parts of the step buffers that a decode of `rows` uses; made once a batch size."""
        views = self._decode_views.get(rows)
        if views is None:
            io = self._io
            views = _DecodeViews(
                io.inputs_embeds.view((rows, self._config.hidden_size)),
                io.position_ids.view((rows,)),
                io.select_token_indices.view((rows,)),
                self._caches.lengths.view((rows,)),
                io.output_logits.view((rows, self._config.output_vocab_size)),
            )
            self._decode_views[rows] = views
        return views

    def _write_new_rows(self, dims: InferenceDims) -> None:
        """Classic dialect: put the step's keys and values into the caches."""
        config, io, kv = self._config, self._io, self._caches.kv
        shape = (dims.batch, config.num_kv_heads, dims.seq_len, config.head_dim)
        start = self._caches.lengths.array[: dims.batch]
        index = slot_index(start, config.num_kv_heads, dims.seq_len)
        caches, rows = kv.keys + kv.values, io.new_keys + io.new_values
        for cache, fresh in zip(caches, rows, strict=True):
            write_rows(kv.view(cache, dims.batch), fresh.view(shape), index)
