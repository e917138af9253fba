from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import CapturedStep, Device, Stream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import BindingSnapshot
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.runner.pipeline_io import StepIO, build_tensor_map
from hearth.runtime.runner.shared_resources import SharedResources
from hearth.runtime.tensors.profiles import InferenceDims, decode_batches
from hearth.runtime.tensors.tensor import Tensor, TensorMap


class StepBindings:
    """The bindings of one engine's steps: a step is prepared, executed, and its rows kept.

    A step serves the first rows. A step of a `prompt` may begin at any row `first`: then caches are
    bound from that row on, and all other buffers, the start index too, from their element 0.
    """

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        executor: EngineExecutor,
        step: StepIO,
        resources: SharedResources,
        device: Device,
        *,
        prompt: StepIO | None = None,
        cache_index: int = 0,
    ) -> None:
        self.executor = executor
        self.stream = device.stream
        self.caches = resources.cache_managers[cache_index]
        self._fresh = step.new_keys + step.new_values
        self._batches = decode_batches(config)
        # A classic step leaves what padded rows ran in its own outputs.
        padded = len(self._batches) < config.max_supported_batch_size and not self._fresh
        # A draft also takes the newest tokens, of which a tree of chains gives one more than slots.
        widest = max(config.max_verify_tree_size, config.max_draft_tree_size + 1)
        self._padding = widest if padded else 0
        self._ops = device.ops
        self._prompt = prompt or step
        self._step, self._resources, self._cache_index = step, resources, cache_index
        self._lora = None if cache_index else resources.lora
        if self._lora is not None:
            executor.expect_addresses(len(self._lora.sets) - 1)
        self._maps: dict[tuple[str, int | None, int], TensorMap] = {}
        self._tensors = self._map("", None)
        self._captured: dict[tuple[int, InferenceDims], None] = {}

    def padded(self, rows: int) -> int:
        """The batch in which a decode, verify or draft step of `rows` rows runs."""
        return next(size for size in self._batches if size >= rows)

    def reset_for_captures(self, batch_sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Empty the caches; pairs of each batch in which these sizes run and each bucket.

        Call it between batches: a capture may run the step, which writes into the caches.
        """
        self.caches.reset(0)
        return product(sorted({self.padded(size) for size in batch_sizes}), self.caches.kv.buckets)

    def begin_prompt(self, first: int, rows: int, width: int) -> None:
        """Grow the caches for a chunk of `width` tokens in each row from `first` on; set its start.

        Rows may start at different cache slots. Raises `capacity_exceeded` if start and width
        exceed the capacity, and `internal` if these rows do not exist; then nothing has changed.
        """
        starts = self.caches.row_lengths[first : first + rows]
        if not rows or first < 0 or len(starts) != rows:
            raise HearthError("internal", f"there are no {rows} rows from place {first} on")
        self.caches.reserve(max(starts) + width)
        for row, start in enumerate(starts, first):
            # A tree that ran padded wrote further behind these slots than a narrow chunk will.
            self.caches.kv.zero(row, start + width, start + self._padding)
        self._ops.set_lengths(self._prompt.inputs.lengths, starts)

    def prepare(self, profile: int, dims: InferenceDims, first: int | None = None) -> None:
        """Bind a step, which `executor.execute(stream)` then runs."""
        adapter = "" if self._lora is None else self._lora.bound
        key = (adapter, first, 0 if first is None else self.caches.kv.bucket)
        tensors = self._maps.get(key)
        if tensors is None:
            tensors = self._map(adapter, first)
        self.executor.prepare(profile, dims, tensors, self.stream)

    def capture(self, profile: int, dims: InferenceDims) -> None:
        """Capture a step whose inputs are filled, for each adapter that has bindings of its own."""
        self._captured[profile, dims] = None
        for _ in self.each_set(profile, dims):
            self.executor.capture_graph(self.stream)

    def each_set(self, profile: int, dims: InferenceDims) -> Iterator[None]:
        """Prepare a step with the bound adapter, and then with each other adapter."""
        self.prepare(profile, dims)
        yield
        if self._lora is not None:
            for adapter in sorted(self._lora.sets - {self._lora.bound}):
                self.executor.prepare(profile, dims, self._map(adapter, None), self.stream)
                yield

    def add_adapter(self, adapter: str) -> None:
        """Capture for a new adapter the steps that were captured for the others."""
        self.executor.expect_addresses(1)
        for profile, dims in self._captured:
            # A capture runs nothing where a switch binds anew, on the CPU: rows may be active.
            self.executor.prepare(profile, dims, self._map(adapter, None), self.stream)
            self.executor.capture_graph(self.stream)

    def drop_adapter(self, adapter: str) -> None:
        """Forget the bindings of an adapter, and their graphs."""
        dropped = [key for key in self._maps if key[0] == adapter]
        self.executor.forget([self._maps.pop(key) for key in dropped])
        self.executor.expect_addresses(-1)

    def set(self, name: str, tensor: Tensor) -> None:
        """Bind another tensor from the next step on, and free the graphs that have the old one."""
        self.executor.forget(list(self._maps.values()))
        for tensors in self._maps.values():
            tensors.set(name, tensor)

    def capture_again(self) -> None:
        """Capture all captured steps again; on a CPU, where a capture runs no step."""
        for profile, dims in self._captured:
            for _ in self.each_set(profile, dims):
                self.executor.capture_graph(self.stream)

    def keep(self, rows: int, tokens: int, first: int | None = None) -> None:
        """Write the new cache rows, of `tokens` tokens each, of a step's first `rows` rows.

        In the native dialect the engine itself has written them, behind the filled slots.
        """
        if not self._fresh:
            return
        start = (self._step if first is None else self._prompt).inputs.lengths
        self.caches.kv.write(self._fresh, start, (rows, tokens), first or 0)

    def _map(self, adapter: str, first: int | None) -> TensorMap:
        key = (adapter, first, 0 if first is None else self.caches.kv.bucket)
        tensors = self._maps.get(key)
        if tensors is None:
            tensors = self._maps[key] = TensorMap()
            step = self._step if first is None else self._prompt
            resources, index = self._resources, self._cache_index
            build_tensor_map(tensors, step, resources, index, first, adapter=adapter)
        return tensors


Execute = Callable[[Stream], object]
"""Call that runs the prepared step."""
Work = Callable[[Execute], None]


class CapturedSteps:
    """Work around a step, captured as one launch for each step that it runs.

    Only steps of an engine of kernels can be captured together with other work.
    """

    def __init__(
        self, config: LLMEngineRunnerConfig, device: Device, bindings: StepBindings
    ) -> None:
        self.takes_work = config.backend == "kernels"
        """True if work is captured with the step that begins it; else the step alone."""
        self._device = device
        self._bindings = bindings
        self._known: dict[BindingSnapshot, CapturedStep] = {}

    def capture(self, profile: int, dims: InferenceDims, work: Work) -> None:
        """Capture a step, whose inputs are filled, or all of the `work` that runs it.

        Work that cannot be captured is counted, and later runs without a graph.
        """
        if not self.takes_work:
            self._bindings.capture(profile, dims)
            return
        executor = self._bindings.executor
        for _ in self._bindings.each_set(profile, dims):
            # Further steps of the work may be prepared on the way.
            snapshot = executor.snapshot
            try:
                captured = self._device.record(partial(work, executor.queue))
            except HearthError as error:
                if error.code == "device_lost":
                    raise
                executor.counters.failed_captures += 1
                executor.counters.failure = error.message
                continue
            if captured is not None:
                older = self._known.pop(snapshot, None)
                self._known[snapshot] = captured
                executor.counters.captures += 1
                if older is not None:
                    older.close()

    def run(self, work: Work, times: int = 1) -> None:
        """Do the work, which runs the prepared step `times` times."""
        if not self.launch(times):
            work(self._bindings.executor.execute)

    @property
    def ready(self) -> bool:
        """True if work was captured around the prepared step."""
        return self._bindings.executor.snapshot in self._known

    def launch(self, times: int = 1) -> bool:
        """Launch the work captured around the prepared step; False if none was.

        A launch that fails has done nothing: it is counted, and returns False as well.
        """
        executor = self._bindings.executor
        captured = self._known.get(executor.snapshot) if self._known and times else None
        if captured is None:
            return False
        try:
            captured.launch(self._bindings.stream)
        except HearthError as error:
            if error.code == "device_lost":
                raise
            executor.counters.fallbacks += 1
            return False
        executor.counters.hits += times
        return True

    def close(self) -> None:
        """Free all captured work."""
        with ExitStack() as closing:
            while self._known:
                closing.callback(self._known.popitem()[1].close)
