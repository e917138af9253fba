from collections.abc import Iterable, Iterator
from itertools import product

from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device
from runtime.executor.engine_executor import EngineExecutor
from runtime.steps.pipeline_io import StepIO, build_tensor_map
from runtime.steps.shared_resources import SharedResources
from runtime.tensors.dims import InferenceDims
from runtime.tensors.profiles import decode_batches
from runtime.tensors.tensor_map import TensorMap


class StepBindings:
    """The bindings of one engine's steps: a step is prepared, executed, and its rows kept."""

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        executor: EngineExecutor,
        step: StepIO,
        resources: SharedResources,
        device: Device,
        *,
        cache_index: int = 0,
    ) -> None:
        self.executor = executor
        self.stream = device.stream
        self.caches = resources.cache_managers[cache_index]
        self._fresh = step.new_keys + step.new_values
        self._batches = decode_batches(config)
        self._tensors = TensorMap()
        build_tensor_map(self._tensors, step, resources, cache_index)

    def padded(self, rows: int) -> int:
        """The batch in which a decode, verify or draft step of `rows` rows runs."""
        return next(size for size in self._batches if size >= rows)

    def captured(self, batch_sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Empty the caches, and give each batch that these sizes run in with each bucket.

        Call it between batches: a capture may run the step, which writes into the caches.
        """
        self.caches.reset(0)
        return product(sorted({self.padded(size) for size in batch_sizes}), self.caches.kv.buckets)

    def prepare(self, profile: int, dims: InferenceDims) -> None:
        """Bind a step, which `executor.execute(stream)` then runs."""
        self.executor.prepare(profile, dims, self._tensors, self.stream)

    def capture(self, profile: int, dims: InferenceDims) -> None:
        """Capture a step whose inputs are filled."""
        self.prepare(profile, dims)
        self.executor.capture_graph(self.stream)

    def keep(self, rows: int, tokens: int) -> None:
        """Write the new cache rows, of `tokens` tokens each, of a step's first `rows` rows.

        In the native dialect the engine itself has written them, behind the filled slots.
        """
        if self._fresh:
            self.caches.kv.write(self._fresh, self.caches.lengths, (rows, tokens))
