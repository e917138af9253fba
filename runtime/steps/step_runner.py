from runtime.caches.hybrid_cache_manager import HybridCacheManager
from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device
from runtime.executor.engine_executor import EngineExecutor
from runtime.steps.pipeline_io import PipelineIO, build_tensor_map
from runtime.steps.shared_resources import SharedResources
from runtime.tensors.dims import InferenceDims
from runtime.tensors.profiles import decode_batches
from runtime.tensors.tensor_map import TensorMap


class StepRunner:
    """Runs the filled steps of one engine: binds, executes and writes new cache rows."""

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        executor: EngineExecutor,
        io: PipelineIO,
        resources: SharedResources,
        device: Device,
        *,
        cache_index: int = 0,
    ) -> None:
        self.executor = executor
        self.caches: HybridCacheManager = resources.cache_managers[cache_index]
        self._fresh = io.new_keys + io.new_values
        self._stream = device.stream
        self._batches = decode_batches(config)
        self._tensors = TensorMap()
        build_tensor_map(self._tensors, io, resources, cache_index)

    def padded(self, rows: int) -> int:
        """The batch in which a decode, verify or draft step of `rows` rows runs."""
        return next(size for size in self._batches if size >= rows)

    def prepare(self, profile: int, dims: InferenceDims) -> None:
        """Bind a step."""
        self.executor.prepare(profile, dims, self._tensors, self._stream)

    def capture(self, profile: int, dims: InferenceDims) -> None:
        """Capture a step whose inputs are filled."""
        self.prepare(profile, dims)
        self.executor.capture_graph(self._stream)

    def run(self, profile: int, dims: InferenceDims, rows: int) -> None:
        """Run a step; its new cache rows are written for the first `rows` rows.

        In the native dialect the engine itself writes them, behind the filled slots.
        """
        self.prepare(profile, dims)
        self.execute()
        if self._fresh:
            self.caches.kv.write(self._fresh, self.caches.lengths, rows, dims.seq_len)

    def execute(self) -> None:
        """Run the step that was prepared last; nothing of it is kept."""
        self.executor.execute(self._stream)
