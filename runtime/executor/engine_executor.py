from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Device, Stream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import (
    Binding,
    BindingSnapshot,
    CapturedRun,
    Engine,
    EngineConfig,
    EngineOptions,
    GraphCache,
    GraphCounters,
    Initializers,
    IOTensor,
)
from hearth.runtime.executor.simulated_engine import SimulatedEngine
from hearth.runtime.onnx_runtime import load_onnx_runtime
from hearth.runtime.tensors.profiles import Profile, Selector, StepDims, build_profiles
from hearth.runtime.tensors.registry import (
    TensorRegistry,
    TensorSpec,
    build_registry_for_llm,
    build_registry_for_spec_decode_draft,
    build_registry_for_tower,
    build_tower_profiles,
)
from hearth.runtime.tensors.tensor import Tensor, TensorMap
from hearth.runtime.undo import undoing
from hearth.runtime.vision_config import VisionConfig
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager

_UNREGISTERED = ("rope_cos", "rope_sin")
"""Tables that all rows share: their shape follows no step."""


def check_bindings(io_tensors: Sequence[IOTensor], registry: TensorRegistry) -> None:
    """Compare an engine with the registry that its configuration gives.

    Raises `engine_incompatible` naming the first binding that is missing, that differs in
    direction, type, rank or a fixed size.
    """
    known = {tensor.name: tensor for tensor in io_tensors}
    for spec in (*registry.specs, *registry.own_specs):
        tensor = known.get(spec.name)
        if tensor is None:
            raise _mismatch(spec.name, "is missing")
        if tensor.direction != spec.direction:
            raise _mismatch(spec.name, f"is an {tensor.direction}, not an {spec.direction}")
        if tensor.dtype != spec.dtype:
            raise _mismatch(spec.name, f"is {tensor.dtype} instead of {spec.dtype}")
        if not _same_sizes(tensor, spec):
            raise _mismatch(spec.name, f"has shape {tensor.shape} instead of {spec.shape}")


def check_known(io_tensors: Sequence[IOTensor], registry: TensorRegistry) -> None:
    """Raise `engine_incompatible` naming the first binding that nothing would be bound to."""
    for tensor in io_tensors:
        if not registry.knows(tensor.name) and tensor.name not in _UNREGISTERED:
            raise _mismatch(tensor.name, "is unknown to this runtime")


def _same_sizes(tensor: IOTensor, spec: TensorSpec) -> bool:
    if len(tensor.shape) != len(spec.shape):
        return False
    pairs = zip(tensor.shape, spec.shape, strict=True)
    return all(
        have == want for have, want in pairs if isinstance(have, int) and isinstance(want, int)
    )


def _mismatch(name: str, what: str) -> HearthError:
    return HearthError(
        "engine_incompatible", f"the engine's binding {name} {what}: export the model again", name
    )


_PREPARED_LIMIT = 256
"""Number of prepared steps that are kept, for each set of addresses.

Prefill chunks have many lengths, and each step holds a view a binding.
"""

_UNPREPARED = "prepare a step before it is run"


class _PreparedStep(NamedTuple):
    key: tuple[object, ...]
    bindings: tuple[Binding, ...]
    snapshot: BindingSnapshot


class EngineExecutor:
    """Executor that binds, runs and captures one engine; it knows no model, phase or feature.

    `prepare` sets the step that `execute` and `capture_graph` refer to. Graphs are kept for the
    newest `address_sets` sets of addresses.
    """

    def __init__(
        self,
        engine: Engine,
        registry: TensorRegistry,
        profiles: tuple[Profile, ...],
        address_sets: int = 2,
    ) -> None:
        check_bindings(engine.io_tensors, registry)
        self._engine = engine
        self._registry = registry
        self._profiles = profiles
        self._graphs = GraphCache(address_sets)
        self._prepared_limit = _PREPARED_LIMIT
        self._prepared: OrderedDict[tuple[object, ...], _PreparedStep] = OrderedDict()
        self._current: _PreparedStep | None = None
        # Graph of the current step; looked up again whenever steps or graphs change.
        self._graph: CapturedRun | None = None
        self._profile_in_use: int | None = None
        self._open_engine: Callable[..., Engine] | None = None

    @classmethod
    def create_for_llm(
        cls,
        folder: Path,
        config: LLMEngineRunnerConfig,
        options: EngineOptions,
        device: Device,
        weights: ExternalWeightManager | None = None,
    ) -> "EngineExecutor":
        """Load the decoder engine of an engine folder with the backend that `config` names.

        It takes external `weights` as initializers or as bindings, as its backend can. It cannot
        run before it has the context memory that it wants, if any.
        """
        registry = build_registry_for_llm(config)
        return cls._create(folder, config, options, device, registry, weights=weights)

    @classmethod
    def create_for_spec_decode_draft(
        cls,
        folder: Path,
        config: LLMEngineRunnerConfig,
        options: EngineOptions,
        device: Device,
        weights: ExternalWeightManager | None = None,
    ) -> "EngineExecutor":
        """Load the draft engine of a folder, as `create_for_llm` does a decoder's."""
        registry = build_registry_for_spec_decode_draft(config)
        return cls._create(folder, config, options, device, registry, weights=weights)

    @classmethod
    def create_for_tower(
        cls, folder: Path, config: VisionConfig, options: EngineOptions, device: Device
    ) -> "EngineExecutor":
        """Load the vision tower of a folder, as `create_for_llm` does a decoder."""
        registry = build_registry_for_tower(config)
        with undoing() as undo:
            engine = _open_engine(folder, config, options, device, registry)
            undo.callback(engine.close)
            return cls(engine, registry, build_tower_profiles(config))

    @classmethod
    def _create(
        cls,
        folder: Path,
        config: LLMEngineRunnerConfig,
        options: EngineOptions,
        device: Device,
        registry: TensorRegistry,
        *,
        weights: ExternalWeightManager | None = None,
    ) -> "EngineExecutor":
        for spec in () if weights is None else weights.specs:
            registry.add_own(spec)
        # A draft's steps have two, a decoder's decode steps one, and its prefill steps one a place.
        address_sets = 1 + config.max_supported_batch_size
        with undoing() as undo:
            open_engine = partial(_open_engine, folder, config, options, device, registry)
            given = None if weights is None else Initializers(*weights.initializers)
            engine = open_engine(initializers=given)
            undo.callback(engine.close)
            check_known(engine.io_tensors, registry)
            made = cls(engine, registry, build_profiles(config), address_sets)
        made._open_engine = open_engine
        return made

    def prepare(self, profile: int, dims: StepDims, tensors: TensorMap, stream: Stream) -> None:
        """Resolve every binding's address and shape for a step of `dims`.

        Raises `invalid_value` for a size out of the profile and `engine_incompatible` naming a
        binding that is missing or of another type.
        """
        key = (profile, dims, tensors, tensors.epoch)
        # Most steps of a decode are the one before over again.
        if self._current is not None and self._current.key == key:
            return
        prepared = self._prepared.get(key)
        if prepared is None:
            bindings = self._bind(profile, dims, tensors)
            prepared = _PreparedStep(key, bindings, BindingSnapshot.of(bindings))
            self._prepared[key] = prepared
            if len(self._prepared) > self._prepared_limit:
                self._prepared.popitem(last=False)
        else:
            self._prepared.move_to_end(key)
        if profile != self._profile_in_use:
            self._engine.use_profile(profile, stream)
            self._profile_in_use = profile
        self._current = prepared
        self._graph = self._graphs.find(prepared.snapshot)

    def execute(self, stream: Stream) -> bool:
        """Run the prepared step: its captured graph if there is one, else an ordinary run.

        If a graph fails the step runs without it, except on a lost device. Returns True if the
        graph ran.
        """
        step, graph, counters = self._current, self._graph, self._graphs.counters
        if step is None:
            raise HearthError("internal", _UNPREPARED)
        if graph is None:
            counters.misses += 1
        else:
            try:
                graph.launch(stream)
            except HearthError as error:
                if error.code == "device_lost":
                    raise
                counters.fallbacks += 1
            else:
                counters.hits += 1
                return True
        self._engine.run(step.bindings, stream)
        return False

    def queue(self, stream: Stream) -> None:
        """Run the prepared step itself, for a caller that captures it with other work."""
        self._engine.run(self._step().bindings, stream)

    @property
    def snapshot(self) -> BindingSnapshot:
        """Snapshot of the prepared step."""
        return self._step().snapshot

    def capture_graph(self, stream: Stream) -> None:
        """Capture the prepared step, so that `execute` launches it from now on.

        A step that cannot be captured is counted, and later runs without a graph.
        """
        step = self._step()
        try:
            graph = self._engine.capture(step.bindings, stream)
        except HearthError as error:
            if error.code == "device_lost":
                raise
            self._engine.run(step.bindings, stream)
            stream.synchronize()
            self.counters.failed_captures += 1
            self.counters.failure = error.message
        else:
            self._graphs.store(step.snapshot, graph)
            self._graph = graph

    def expect_addresses(self, more: int) -> None:
        """Keep graphs and prepared steps of `more` further sets of addresses."""
        self._graphs.expect(more)
        self._prepared_limit += more * _PREPARED_LIMIT

    def forget(self, maps: Collection[TensorMap]) -> None:
        """Free the graphs of these maps, and the steps that were prepared from them."""
        if self._current is not None and self._current.key[2] in maps:
            self._current = None
        for key in [key for key in self._prepared if key[2] in maps]:
            del self._prepared[key]
        for tensors in maps:
            self._graphs.drop(tuple(tensors.get(io.name).address for io in self._engine.io_tensors))
        # Another map may have the same addresses.
        self._graph = None if self._current is None else self._graphs.find(self._current.snapshot)

    @property
    def counters(self) -> GraphCounters:
        """Captures, hits, misses and fallbacks so far."""
        return self._graphs.counters

    def required_context_memory(self) -> int:
        """Bytes of scratch memory that the engine wants from its caller."""
        return self._engine.required_context_memory

    def set_context_memory(self, memory: Tensor) -> None:
        """Provide scratch memory; raises `invalid_value` when it is too small.

        Graphs that were captured with other memory are freed.
        """
        needed = self._engine.required_context_memory
        if memory.nbytes < needed:
            raise HearthError(
                "invalid_value",
                f"the engine needs {needed} bytes of context memory, got {memory.nbytes}",
                memory.name,
            )
        self._graph = None
        self._graphs.clear()
        self._engine.set_context_memory(memory)

    @property
    def engine(self) -> Engine:
        """The engine itself, for introspection."""
        return self._engine

    @property
    def num_io_tensors(self) -> int:
        """The number of the engine's bindings."""
        return len(self._engine.io_tensors)

    @property
    def num_profiles(self) -> int:
        """Number of profiles: one of prompts, and the profiles of decode steps."""
        return len(self._profiles)

    def io_tensor_name(self, index: int) -> str:
        """The name of binding `index`; raises `invalid_value` when there is none."""
        if not 0 <= index < self.num_io_tensors:
            raise HearthError("invalid_value", f"the engine has no binding {index}", "index")
        return self._engine.io_tensors[index].name

    def binding_dtype(self, name: str) -> np.dtype[Any]:
        """The element type of a binding; raises `invalid_value` when there is none."""
        for tensor in self._engine.io_tensors:
            if tensor.name == name:
                return tensor.dtype
        raise HearthError("invalid_value", f"the engine has no binding {name}", name)

    def follows_steps(self, name: str) -> bool:
        """Return True if the shape of a binding follows a step's sizes, as profiles hold it."""
        return self._registry.get(name) is not None

    def profile_shape(self, name: str, profile: int, selector: Selector) -> tuple[int, ...]:
        """The smallest, typical or largest shape of a registered binding in a profile."""
        spec = self._registry.get(name)
        if spec is None:
            raise HearthError("invalid_value", f"no shape of {name} follows from a profile", name)
        return spec.resolve(self._profile(profile).select(selector))

    def reopen(self, weights: ExternalWeightManager) -> None:
        """Open the engine again with these weights as initializers, while no step is under way.

        Its captured graphs are void. Raises the errors of opening; then the executor is closed.
        """
        if self._open_engine is None or self.required_context_memory():
            raise HearthError("internal", "this engine is not opened a second time")
        self.close()
        self._engine = self._open_engine(initializers=Initializers(*weights.initializers))

    def close(self) -> None:
        """Free captured graphs and the engine; the executor cannot be used afterwards."""
        self._current = self._graph = None
        self._prepared.clear()
        with ExitStack() as closing:
            closing.callback(self._engine.close)
            closing.callback(self._graphs.clear)

    def _profile(self, index: int) -> Profile:
        if not 0 <= index < len(self._profiles):
            raise HearthError("invalid_value", f"the engine has no profile {index}", "profile")
        return self._profiles[index]

    def _step(self) -> _PreparedStep:
        if self._current is None:
            raise HearthError("internal", _UNPREPARED)
        return self._current

    def _bind(self, profile: int, dims: StepDims, tensors: TensorMap) -> tuple[Binding, ...]:
        self._profile(profile).check(dims)
        return tuple(self._resolve(io, dims, tensors) for io in self._engine.io_tensors)

    def _resolve(self, io: IOTensor, dims: StepDims, tensors: TensorMap) -> Binding:
        tensor = tensors.get(io.name)
        if tensor.dtype != io.dtype:
            raise HearthError(
                "engine_incompatible",
                f"the engine wants {io.name} as {io.dtype}, its buffer is {tensor.dtype}",
                io.name,
            )
        spec = self._registry.get(io.name)
        shape = tensor.shape if spec is None else spec.resolve(dims)
        tensor.check(shape)
        return Binding(io.name, io.direction, tensor, shape)


def _open_engine(
    folder: Path,
    config: EngineConfig,
    options: EngineOptions,
    device: Device,
    registry: TensorRegistry,
    *,
    initializers: Initializers | None = None,
) -> Engine:
    if config.backend == "simulated":
        return SimulatedEngine(config, registry)
    # Each engine needs a library that an installation for another one does not have.
    if device.kind == "cpu":
        load_onnx_runtime()
        from hearth.runtime.executor.onnx_engine import OnnxEngine  # noqa: PLC0415 - see above

        return OnnxEngine.open(folder, config, options, initializers)
    from hearth.runtime.device.cuda.cuda_device import CudaDevice  # noqa: PLC0415 - see above

    if not isinstance(device, CudaDevice):
        raise HearthError("internal", f"a device of kind {device.kind} runs no CUDA engine")
    if config.backend == "tensorrt":
        from hearth.runtime.executor.tensorrt_engine import TensorRTEngine  # noqa: PLC0415 - see above

        return TensorRTEngine.open(folder, config, device.context)
    if config.backend == "kernels":
        from hearth.runtime.executor.kernels.engine import KernelsEngine  # noqa: PLC0415 - see above

        return KernelsEngine.open(
            folder,
            config,
            device,
            registry,
            ranks_alone=options.ranks_alone,
            progress=options.progress,
        )
    load_onnx_runtime()
    from hearth.runtime.executor.onnx_cuda_engine import OnnxCudaEngine  # noqa: PLC0415 - see above

    return OnnxCudaEngine.open(folder, config, options, device, initializers)
