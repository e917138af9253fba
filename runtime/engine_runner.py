from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.caches.hybrid_cache_manager import HybridCacheManager
from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device, StepBuffers
from runtime.errors import HearthError
from runtime.executor.engine_executor import EngineExecutor
from runtime.pipeline_io import PipelineIO, build_tensor_map
from runtime.shared_resources import SharedResources
from runtime.tensors.dims import PROFILE_CONTEXT, InferenceDims
from runtime.tensors.profiles import decode_batches, decode_profile
from runtime.tensors.tensor import Tensor
from runtime.tensors.tensor_map import TensorMap


class LLMEngineRunner:
    """Runs the steps of one decoder: the one place that fills step inputs.

    Rows of a step are the first rows of the batch. A step's logits [max batch, 1, V] are a step
    buffer, whose first rows hold until the next step.
    """

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        executor: EngineExecutor,
        io: PipelineIO,
        resources: SharedResources,
        device: Device,
    ) -> None:
        self._config = config
        self._executor = executor
        self._io = io
        self._resources = resources
        self._caches = resources.cache_managers[0]
        self._device = device
        self._ops = device.ops
        self._buffers = StepBuffers(
            table=resources.embedding,
            next_tokens=io.next_tokens,
            embeds=io.inputs_embeds,
            positions=io.position_ids,
            select=io.select_token_indices,
            start=self._caches.lengths,
        )
        self._decode_batches = decode_batches(config)
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

    def execute_prefill_step(self, token_ids: NDArray[np.int64], lengths: Sequence[int]) -> Tensor:
        """Run the next chunk of the first rows' prompts and return the last tokens' logits.

        `token_ids` [rows, S] is padded at the right to the longest chunk; `lengths` counts the
        tokens of each row. All rows must start at the same slot.
        """
        rows, width = token_ids.shape
        caches = self._caches
        starts = set(caches.row_lengths[:rows])
        if len(starts) != 1:
            raise HearthError("internal", "rows of a prefill step must start at the same slot")
        caches.reserve(starts.pop() + width)
        self._io.host_context_lengths.array[:rows] = lengths
        self._ops.feed_prefill(self._buffers, token_ids, lengths)
        self._run(PROFILE_CONTEXT, InferenceDims.prefill(rows, width, caches.kv.bucket), rows)
        caches.commit(lengths)
        return self._io.output_logits

    def execute_vanilla_decoding_step(self) -> Tensor:
        """Run the newest token of every live row and return the logits.

        The step may run padded to a larger batch, whose further rows nobody reads.
        """
        caches = self._caches
        caches.reserve(max(caches.row_lengths) + 1)
        batch = self._padded(caches.batch)
        self._ops.feed_decode(self._buffers, batch)
        dims = InferenceDims.decode(batch, caches.kv.bucket)
        self._run(decode_profile(self._config, batch), dims, caches.batch)
        caches.advance()
        return self._io.output_logits

    def capture_vanilla_decoding_graph(self, batch_sizes: Iterable[int]) -> None:
        """Capture the decode step of each batch size in every bucket.

        Call it between batches: a capture may run the step, which writes into the caches.
        """
        self._caches.reset(0)
        for batch in sorted({self._padded(size) for size in batch_sizes}):
            profile = decode_profile(self._config, batch)
            for bucket in self._caches.kv.buckets:
                self._ops.feed_decode(self._buffers, batch)
                self._prepare(profile, InferenceDims.decode(batch, bucket))
                self._executor.capture_graph(self._device.stream)

    def close(self) -> None:
        """Free captured graphs, the engine and the device's memory."""
        self._executor.close()
        self._device.close()

    def _padded(self, rows: int) -> int:
        return next(size for size in self._decode_batches if size >= rows)

    def _prepare(self, profile: int, dims: InferenceDims) -> None:
        self._executor.prepare(profile, dims, self._tensors, self._device.stream)

    def _run(self, profile: int, dims: InferenceDims, rows: int) -> None:
        self._prepare(profile, dims)
        self._executor.execute(self._device.stream)
        if self._io.new_keys:
            # Classic dialect: the engine gives the new rows alone.
            fresh = self._io.new_keys + self._io.new_values
            self._caches.kv.write(fresh, self._caches.lengths, rows, dims.seq_len)
