import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.batch import RowOwner
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import CapturedSampler, Device
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.images import EmbeddingStore
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from hearth.runtime.lora.adapter import Adapter, check_rank
from hearth.runtime.lora.lora_manager import LoRAManager
from hearth.runtime.memory.estimates import prompt_graph_bytes
from hearth.runtime.memory.system import available_memory
from hearth.runtime.runner.bindings import CapturedSteps, Execute, StepBindings
from hearth.runtime.runner.image_merge import ImageMerge, ImagePiece, MultimodalMetrics
from hearth.runtime.runner.pipeline_io import PipelineIO
from hearth.runtime.runner.shared_resources import SharedResources
from hearth.runtime.tensors.profiles import (
    PROFILE_CONTEXT,
    InferenceDims,
    captured_prompts,
    generation_profile,
    prefill_widths,
)
from hearth.runtime.tensors.tensor import Tensor
from hearth.runtime.weights.external_weight_manager import Loaded

_OTHERS_BYTES = 64 << 20


class PromptGraphs(msgspec.Struct):
    """Captured prefill steps, the seconds and bytes that they took, and later prefill steps.

    `hits` counts steps that were launched from a graph, `misses` the others.
    """

    captures: int = 0
    seconds: float = 0.0
    bytes: int = 0
    hits: int = 0
    misses: int = 0


class LLMEngineRunner:
    """Runner that fills and runs the steps of one decoder.

    A decode or verify step takes the first rows of the batch, a prompt chunk the rows from any
    place on. A step's logits are a step buffer, used as dense [rows, tokens that get logits, V];
    they stay until the next step.
    """

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        executor: EngineExecutor,
        io: PipelineIO,
        resources: SharedResources,
        device: Device,
        *,
        embeddings: EmbeddingStore | None = None,
    ) -> None:
        self.executor = executor
        """Executor, public for counters and introspection."""
        self.prompt_graphs = PromptGraphs()
        self._config = config
        self._resources = resources
        self._lora = resources.lora
        self._caches = resources.cache_managers[0]
        self._device = device
        self._ops = device.ops
        self._inputs, self._logits, self._trees = io.step.inputs, io.step.logits, io.trees
        self._prompt = io.prompt
        self._steps = StepBindings(config, executor, io.step, resources, device, prompt=io.prompt)
        self._captured = CapturedSteps(config, device, self._steps)
        self._alone: set[int] = set()
        # By rows and bucket: the batch of a decode step, its profile and its sizes.
        self._decodes: dict[tuple[int, int], tuple[int, int, InferenceDims]] = {}
        self._images: ImageMerge | None = None
        self.multimodal_metrics = MultimodalMetrics()
        """Counters of images in prompts."""
        if embeddings is not None:
            prompt = io.prompt
            self._images = ImageMerge(
                embeddings, device, prompt.inputs.inputs_embeds, prompt.deepstack
            )
            self.multimodal_metrics = self._images.metrics

    def get_engine_config(self) -> LLMEngineRunnerConfig:
        """The configuration that the engine runs with."""
        return self._config

    def get_kv_cache(self) -> HybridCacheManager:
        """The caches of this engine and the lengths of its rows."""
        return self._caches

    def get_rope_cos_sin_tensors(self) -> tuple[Tensor, ...]:
        """The rotary tables as bound; none for an engine that has none."""
        return self._resources.rope

    def get_active_lora_weights_name(self) -> str:
        """The adapter that the steps run with; "" for none."""
        return "" if self._lora is None else self._lora.active

    def get_available_lora_weights(self) -> list[str]:
        """The names of the adapters that are loaded."""
        return [] if self._lora is None else self._lora.available

    def get_lora_weights_digest(self, name: str) -> str:
        """A digest of an adapter's numbers, "" for none; raises `adapter_unknown`."""
        return self._adapters().digest(name) if name else ""

    def switch_lora_weights(self, name: str) -> None:
        """Let the next steps run with an adapter, or "" none; raises `adapter_unknown`.

        A row must keep its adapter to its end: call it between batches.
        """
        if name != self.get_active_lora_weights_name():
            self._adapters().switch(name)

    def load_lora_weights(self, name: str, source: Path | Adapter) -> None:
        """Load an adapter, and capture with it the steps that were captured, at any time.

        Raises `adapter_invalid`, `unsupported_option`, `out_of_memory` and `invalid_value`.
        """
        lora = self._adapters()
        lora.load(name, source)
        if lora.rebinds:
            self._steps.add_adapter(name)

    def unload_lora_weights(self, name: str) -> None:
        """Forget an adapter that is not active; raises `adapter_unknown` and `internal`."""
        lora = self._adapters()
        lora.unload(name)
        if lora.rebinds:
            self._steps.drop_adapter(name)

    def _adapters(self) -> LoRAManager:
        if self._lora is None:
            check_rank(1, self._config)
            raise HearthError("internal", "these resources have no adapters")
        return self._lora

    def set_lm_head_weights(self, name: str, tensor: Tensor) -> None:
        """Take another head matrix from the next step on, while no step is under way.

        The engine must have external weights. An engine that binds them is bound anew, any other is
        opened again; captured steps are captured again. Raises `unsupported_option` on a GPU once
        steps are captured, as captures run steps there, and the errors of
        `ExternalWeightManager.set_lm_head_weights`.
        """
        weights = self._resources.external_weights
        if weights is None:
            raise HearthError(
                "unsupported_option",
                "this engine holds its weights itself: export it with --external-weights",
                name,
            )
        if self._device.kind == "cuda" and self.executor.counters.captures:
            raise HearthError(
                "unsupported_option",
                "the steps are captured with the head that they have: set another one before",
                name,
            )
        weights.set_lm_head_weights(name, tensor)
        if weights.bound:
            self._steps.set(name, tensor)
        else:
            self.executor.reopen(weights)
        self._steps.capture_again()

    @property
    def loaded_weights(self) -> Loaded | None:
        """Bytes copied of weights that the engine binds; None if it reads them itself."""
        weights = self._resources.external_weights
        return None if weights is None else weights.loaded

    @property
    def row_owners(self) -> list[RowOwner]:
        """Owners of per-row state: the caches, and rotary tables of every row."""
        return [self._caches, *self._resources.rotary_rows]

    def reset(self, batch: int) -> None:
        """Begin a batch of `batch` empty rows."""
        self._caches.reset(batch)
        for rows in self._resources.rotary_rows:
            rows.reset(batch)

    def execute_prefill_step(
        self,
        token_ids: NDArray[np.int64],
        lengths: Sequence[int],
        first: int = 0,
        images: Sequence[ImagePiece] = (),
    ) -> Tensor:
        """Run the next chunk of the prompts from place `first` on; the last tokens' logits.

        `token_ids` [rows, S] is padded at the right to the longest chunk; `lengths` counts the
        tokens of each row. Embeddings of `images` replace the embeddings of their tokens. Row 0 of
        logits and hidden states is that of place `first`. Raises `capacity_exceeded`, before any
        step runs, if a row's start and S exceed the capacity.
        """
        rows, width = token_ids.shape
        self._prepare_prefill(token_ids, lengths, first)
        if self._images is not None:
            self._images.merge(images)
        if self._steps.executor.execute(self._steps.stream):
            self.prompt_graphs.hits += 1
        else:
            self.prompt_graphs.misses += 1
        self._steps.keep(rows, width, first)
        self._caches.commit(lengths, first)
        return self._logits

    def execute_vanilla_decoding_step(self, rows: int, *, alone: bool = False) -> Tensor:
        """Run the newest token of each of the first `rows` rows and return the logits.

        The step may run padded to a larger batch, whose padding rows are never read. If padding
        rows have prompt left the step writes behind their filled cache slots. A step that is to run
        `alone` again and again, without the sampling of its capture, is captured at its first run.
        """
        self._ops.feed_decode(self._inputs, self._prepare_decode(rows))
        if alone and self._captured.takes_work:
            self._capture_alone()
        self._steps.executor.execute(self._steps.stream)
        self._steps.keep(rows, 1)
        self._caches.advance(rows)
        return self._logits

    def launch_vanilla_decoding_step(self, rows: int) -> bool:
        """Launch the same step as captured with its sampling; False if it was not captured."""
        self._prepare_decode(rows)
        if not self._captured.launch():
            return False
        self._caches.count([1] * rows)
        return True

    def execute_eagle_base_tree_decoding_step(self, rows: int, width: int) -> Tensor:
        """Run the first `width` nodes of the trees of the first `rows` rows; return their logits.

        Logits are [rows, width, V]. Nothing is committed: the caches hold the nodes' keys and
        values behind each row's length, until the next step. It runs padded as a decode step does.
        """
        caches = self._caches
        caches.reserve(max(caches.row_lengths[:rows]) + width)
        batch = self._steps.padded(rows)
        dims = InferenceDims.spec_verify(batch, width, caches.kv.bucket)
        self._steps.prepare(generation_profile(self._config, batch, second=True), dims)
        if not self._captured.launch():
            self._device.tree_ops.feed_verify(self._inputs, self._trees, batch, width)
            self._steps.executor.execute(self._steps.stream)
        self._steps.keep(rows, width)
        return self._logits

    def commit_path(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep keys and values of the given nodes of the first rows' trees, from the root on."""
        caches = self._caches
        counts = [len(path) for path in nodes]
        # A path ascends from node 0: one without gaps lies in its place.
        if any(path and path[-1] != len(path) - 1 for path in nodes):
            table = np.full((len(nodes), max(counts)), -1, np.int32)
            for row, path in enumerate(nodes):
                table[row, : len(path)] = path
            caches.commit_path(table)
        # The device's lengths have grown with the walk.
        caches.count(counts)

    def warm_prefill(self) -> None:
        """Run a prefill step of one row in each of a GPU's widths, between batches.

        A library takes a tenth of a second for the first run of a shape: no request should wait.
        """
        widths = prefill_widths(self._config)
        for width in widths:
            self.reset(1)
            self.execute_prefill_step(np.zeros((1, width), np.int64), [width])
        if widths:
            self._steps.stream.synchronize()
            self.reset(0)

    def capture_prefill_graphs(self) -> None:
        """Capture the prefill steps that have graphs, between batches, once their widths are warm.

        Capturing ends when graphs have filled the memory that was predicted for them, or the small
        allowance for other users of the device if that is more.
        """
        places_and_widths = captured_prompts(self._config)
        if not places_and_widths:
            return
        began, found = time.monotonic(), self.prompt_graphs
        limit = max(prompt_graph_bytes(self._config), _OTHERS_BYTES)
        free = self._free_memory()
        before = self.executor.counters.captures
        for place, width in places_and_widths:
            self.reset(place + 1)
            self._prepare_prefill(np.zeros((1, width), np.int64), [width], place)
            self.executor.capture_graph(self._steps.stream)
            found.bytes = free - self._free_memory()
            if found.bytes >= limit:
                break
        self.reset(0)
        found.captures = self.executor.counters.captures - before
        found.seconds = time.monotonic() - began

    def capture_vanilla_decoding_graph(
        self, batch_sizes: Iterable[int], sampler: CapturedSampler | None = None
    ) -> None:
        """Capture the decode step of each batch size in every bucket, between batches.

        With `sampler`, sampling is captured as part of it, for `launch_vanilla_decoding_step`;
        backends other than kernels capture the step alone.
        """
        for batch, bucket in self._steps.reset_for_captures(batch_sizes):
            self._ops.feed_decode(self._inputs, batch)
            dims = InferenceDims.decode(batch, bucket)
            profile = generation_profile(self._config, batch)
            if sampler is None:
                self._steps.capture(profile, dims)
            else:
                self._captured.capture(profile, dims, partial(self._run_decode, batch, sampler))

    def capture_eagle_base_tree_decoding_graph(
        self, batch_sizes: Iterable[int], widths: Iterable[int]
    ) -> None:
        """Capture the verification of trees of `widths` nodes, as the decode step is captured."""
        for (batch, bucket), width in product(self._steps.reset_for_captures(batch_sizes), widths):
            profile = generation_profile(self._config, batch, second=True)
            self._device.tree_ops.feed_verify(self._inputs, self._trees, batch, width)
            dims = InferenceDims.spec_verify(batch, width, bucket)
            self._captured.capture(profile, dims, partial(self._run_trees, batch, width))

    def _prepare_decode(self, rows: int) -> int:
        """Bind a decode step; the batch in which it runs."""
        caches = self._caches
        caches.reserve(max(caches.row_lengths[:rows]) + 1)
        known = self._decodes.get((rows, caches.kv.bucket))
        if known is None:
            batch = self._steps.padded(rows)
            dims = InferenceDims.decode(batch, caches.kv.bucket)
            known = batch, generation_profile(self._config, batch), dims
            self._decodes[rows, caches.kv.bucket] = known
        batch, profile, dims = known
        self._steps.prepare(profile, dims)
        return batch

    def _capture_alone(self) -> None:
        """Capture the prepared step, once: its run on the way gives what the next one does."""
        executor = self._steps.executor
        if executor.snapshot.key not in self._alone:
            self._alone.add(executor.snapshot.key)
            executor.capture_graph(self._steps.stream)

    def _run_decode(self, batch: int, sampler: CapturedSampler, execute: Execute) -> None:
        self._ops.feed_decode(self._inputs, batch)
        execute(self._steps.stream)
        sampler.queue(batch)

    def _run_trees(self, batch: int, width: int, execute: Execute) -> None:
        self._device.tree_ops.feed_verify(self._inputs, self._trees, batch, width)
        execute(self._steps.stream)

    def _prepare_prefill(
        self, token_ids: NDArray[np.int64], lengths: Sequence[int], first: int
    ) -> None:
        """Fill and bind a prefill step; raises the errors of `execute_prefill_step`."""
        rows, width = token_ids.shape
        self._steps.begin_prompt(first, rows, width)
        self._ops.feed_prefill(self._prompt.inputs, token_ids, lengths)
        dims = InferenceDims.prefill(rows, width, self._caches.kv.bucket)
        self._steps.prepare(PROFILE_CONTEXT, dims, first)

    def _free_memory(self) -> int:
        own = self._device.free_memory()
        return available_memory() if own is None else own

    def close(self) -> None:
        """Free captured graphs, the engine and the device's memory."""
        with ExitStack() as closing:
            closing.callback(self._device.close)
            closing.callback(self.executor.close)
            closing.callback(self._captured.close)
