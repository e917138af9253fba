"""Kernels of our own behind `Engine`: docs/kernels.md."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from msgspec import structs

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cuda.compiler import KernelCompiler
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.graph import GraphCapture
from hearth.runtime.device.cuda.launch import Launcher, PackedStep
from hearth.runtime.device.cuda.programs import KernelRequest, Programs, WantedKernels
from hearth.runtime.device.cuda.stream import CudaStream
from hearth.runtime.device.device import Stream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import Binding, CapturedRun, IOTensor, physical_cores
from hearth.runtime.executor.kernels.attention import AttentionShape, plan_attention
from hearth.runtime.executor.kernels.draft_step import DraftStep
from hearth.runtime.executor.kernels.step import DecoderStep, StepShape
from hearth.runtime.loading import ProgressCallback, no_progress
from hearth.runtime.tensors.profiles import (
    InferenceDims,
    build_profiles,
    decode_batches,
    prefill_widths,
)
from hearth.runtime.tensors.registry import TensorRegistry
from hearth.runtime.tensors.tensor import Tensor
from hearth.runtime.undo import undoing
from hearth.runtime.weights.weights_file import WeightLayout, load_layout

_PACKED_LIMIT = 128
"""Steps whose launches are kept; each holds some hundred small structures."""
_LEAST_CAPABILITY = (8, 0)
_MOST_THREADS = 16
# Accepted and newest tokens of a usual round of speculation.
_ACCEPTED, _NEWEST = 7, 10
_SOMEWHERE = 256


class KernelsEngine:
    """A decoder whose steps are launches of our own kernels.

    A step that is given as the same tuple of bindings again has its launches packed already.
    """

    def __init__(
        self,
        context: CudaContext,
        programs: Programs,
        step: DecoderStep,
        io_tensors: tuple[IOTensor, ...],
        required_context_memory: int,
        *,
        dependent: bool,
    ) -> None:
        self.io_tensors = io_tensors
        self.required_context_memory = required_context_memory
        self._context = context
        self._programs = programs
        self._step = step
        self._launcher = Launcher(context, dependent=dependent)
        self._packed: OrderedDict[int, tuple[Sequence[Binding], PackedStep]] = OrderedDict()
        self._newest: tuple[Sequence[Binding], PackedStep] | None = None

    @classmethod
    def open(
        cls,
        folder: Path,
        config: LLMEngineRunnerConfig,
        device: CudaDevice,
        registry: TensorRegistry,
        *,
        facts: GpuFacts | None = None,
        compiler: KernelCompiler | None = None,
        ranks_alone: bool = False,
        progress: ProgressCallback = no_progress,
    ) -> "KernelsEngine":
        """Compile the kernels of a folder's engine and load them; its weights are bindings.

        `facts` and `compiler` replace the ones of the GPU; `EngineOptions` has the other two.
        Raises `engine_incompatible` naming a fact that kernels do not serve, and `engine_corrupt`.
        """
        layout = load_layout(folder)
        facts = facts or GpuFacts.of(device.context)
        programs = Programs(device.context, compiler or device.library.compiler)
        with undoing() as undo:
            undo.callback(programs.close)
            check_served(config, layout, facts)
            wanted = wanted_kernels(config, layout, registry, facts)
            programs.load(wanted, compiler_threads(), progress)
            io_tensors = io_tensors_of(config, registry)
            kind = DraftStep if config.base_hidden_dim else DecoderStep
            step = kind(config, layout, io_tensors, programs, facts)
            if isinstance(step, DraftStep):
                step.ranks_alone = ranks_alone
            memory = step.provide(step_shapes(config, facts))
            tickets = device.zeros("tickets", (memory.tickets,), np.dtype(np.uint8))
            step.use_tickets(tickets.address)
            return cls(
                device.context,
                programs,
                step,
                io_tensors,
                memory.scratch,
                dependent=facts.dependent,
            )

    def set_context_memory(self, memory: Tensor) -> None:
        """Use `memory` between the launches of a step; steps captured before are void."""
        self._packed.clear()
        self._newest = None
        self._step.use_scratch(memory.address)

    def use_profile(self, _profile: int, _stream: Stream, /) -> None:
        """Do nothing: launches follow a step's shapes."""

    def run(self, bindings: Sequence[Binding], stream: Stream, /) -> None:
        """Queue one step; raises `executor_failed` and `device_lost`."""
        self._pack(bindings).queue(_own(stream))

    def capture(self, bindings: Sequence[Binding], stream: Stream, /) -> CapturedRun:
        """A CUDA graph of the step, which runs once on the way."""
        step, stream = self._pack(bindings), _own(stream)
        # Modules that a first launch loads must not be loaded during capture.
        step.queue(stream)
        stream.synchronize()
        with GraphCapture(self._context, stream) as capture:
            step.queue(stream)
        return capture.graph

    def close(self) -> None:
        """Unload the kernels; graphs that were captured must be closed before."""
        self._packed.clear()
        self._newest = None
        self._programs.close()

    def _pack(self, bindings: Sequence[Binding]) -> PackedStep:
        if self._newest is not None and self._newest[0] is bindings:
            return self._newest[1]
        # The bindings are kept, so that no other has their id.
        kept = self._packed.get(id(bindings))
        if kept is None:
            kept = bindings, self._launcher.pack(self._step.launches(bindings))
            self._packed[id(bindings)] = kept
            if len(self._packed) > _PACKED_LIMIT:
                self._packed.popitem(last=False)
        else:
            self._packed.move_to_end(id(bindings))
        self._newest = kept
        return kept[1]


def compiler_threads() -> int:
    """Return the number of kernels to compile at a time."""
    return min(_MOST_THREADS, physical_cores())


def wanted_kernels(
    config: LLMEngineRunnerConfig, layout: WeightLayout, registry: TensorRegistry, facts: GpuFacts
) -> tuple[KernelRequest, ...]:
    """The kernels that an engine compiles, or finds compiled, when it is opened."""
    io_tensors, wanted = io_tensors_of(config, registry), WantedKernels()
    kind = DraftStep if config.base_hidden_dim else DecoderStep
    # All layers have the same.
    planned = kind(structs.replace(config, num_decoder_layers=1), layout, io_tensors, wanted, facts)
    planned.provide(step_shapes(config, facts))
    for dims, adapted in product(_warm_dims(config), {False, bool(config.lora_targets)}):
        planned.launches(_planned_bindings(io_tensors, registry, dims, adapted=adapted))
    return tuple(wanted.requests)


def check_served(config: LLMEngineRunnerConfig, layout: WeightLayout, facts: GpuFacts) -> None:
    """Raise `engine_incompatible` naming the first fact that the kernels do not serve.

    Facts of the configuration alone are refused where it is read (`config.kernel_limits`).
    """
    model = layout.model
    major, minor = facts.capability
    faults = (
        (facts.capability < _LEAST_CAPABILITY, "device", f"has compute capability {major}.{minor}"),
        (not layout.bound, "external_weight_files", "are read by a graph"),
        (model.head_dim != config.head_dim, "head_dim", "differs from that of the weights"),
    )
    for wrong, name, what in faults:
        if wrong:
            raise HearthError(
                "engine_incompatible",
                f"{name} {what}, which kernels do not serve: export the model again",
                name,
            )


def _own(stream: Stream) -> CudaStream:
    if not isinstance(stream, CudaStream):
        raise HearthError("internal", "kernels run on a stream of CUDA")
    return stream


def io_tensors_of(config: LLMEngineRunnerConfig, registry: TensorRegistry) -> tuple[IOTensor, ...]:
    """The registry's bindings, inputs first; rotary tables of all rows in any length."""
    found = [IOTensor(*one) for one in (*registry.specs, *registry.own_specs)]
    if not config.use_context_dependent_rope:
        for name in ("rope_cos", "rope_sin"):
            shape = (None, config.rotary_dim // 2)
            found.append(IOTensor(name, "input", np.dtype(np.float32), shape))
    return tuple(sorted(found, key=lambda one: one.direction))


def _warm_dims(config: LLMEngineRunnerConfig) -> Iterator[InferenceDims]:
    """The steps whose kernels are compiled ahead."""
    slots, nodes = config.max_kv_cache_capacity, config.max_verify_tree_size
    drafted = config.max_draft_tree_size
    for batch in decode_batches(config):
        yield InferenceDims.decode(batch, slots)
        if nodes:
            yield InferenceDims.spec_verify(batch, nodes, slots)
        if drafted:
            yield InferenceDims.accept(batch, min(_ACCEPTED, drafted), slots)
            yield InferenceDims.proposal(batch, drafted, min(_NEWEST, drafted), slots)
    rows = range(1, config.max_supported_batch_size + 1)
    for batch, width in product(rows, prefill_widths(config)):
        yield InferenceDims.prefill(batch, width, slots)


def step_shapes(config: LLMEngineRunnerConfig, facts: GpuFacts) -> Iterator[StepShape]:
    """The shapes of which one needs most of each part of the scratch memory.

    Caches on a GPU have one size, the capacity. Of each profile these are the largest step, and all
    in which positions of attention are spread over the GPU. A step of more rows or tokens than
    one whose positions are not has them together too.
    """
    heads = AttentionShape(config.head_dim, config.num_attention_heads, config.num_kv_heads)
    for profile in build_profiles(config):
        largest = profile.maximum
        if not isinstance(largest, InferenceDims):
            continue
        batch, longest, slots = largest.batch, largest.seq_len, largest.kv_len
        yield StepShape(batch, longest, slots, largest.select_len)
        for rows in range(1, batch + 1):
            for seq_len in range(1, longest + 1):
                plan = plan_attention(
                    heads,
                    facts.multiprocessors,
                    rows,
                    seq_len,
                    slots,
                    shared_per_block=facts.shared_per_block,
                )
                if plan.whole and not plan.fused:
                    longest = seq_len
                    break
                if not plan.whole:
                    yield StepShape(rows, seq_len, slots, min(seq_len, largest.select_len))


def fixed_shape(io: IOTensor) -> tuple[int, ...]:
    """The shape of a binding without dims; 1 for a size that is free."""
    return tuple(size if isinstance(size, int) else 1 for size in io.shape)


def _planned_bindings(
    io_tensors: Sequence[IOTensor],
    registry: TensorRegistry,
    dims: InferenceDims,
    *,
    adapted: bool,
) -> list[Binding]:
    """Make bindings of a step that is only planned: their addresses are never read."""
    planned = []
    for io in io_tensors:
        spec = registry.get(io.name)
        shape = fixed_shape(io) if spec is None else spec.resolve(dims)
        if io.name.startswith("lora_") and not adapted:
            shape = (shape[0], 0)
        tensor = Tensor.on_device(io.name, _SOMEWHERE, (), io.dtype, None)
        planned.append(Binding(io.name, io.direction, tensor, shape))
    return planned
