import mmap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hearth.runtime.config import PlanRecord
from hearth.runtime.device.cuda.compiler import read_entry, write_entry
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.graph import GraphCapture
from hearth.runtime.device.cuda.stream import CudaStream
from hearth.runtime.device.device import Stream
from hearth.runtime.engine_folder import PLAN_FILE
from hearth.runtime.errors import Code, HearthError
from hearth.runtime.executor.engine import Binding, CapturedRun, EngineConfig, IOTensor
from hearth.runtime.executor.tensorrt_library import (
    check_plan,
    context_bytes,
    give_memory,
    has_old_memory_api,
    load_library,
    make_log,
    new_context,
    numpy_dtype_of,
    open_runtime,
)
from hearth.runtime.files import cache_folder
from hearth.runtime.tensors.tensor import Tensor


class RuntimeCache:
    """Cache file of the kernels that TensorRT-RTX compiles for a plan on this GPU.

    A plan of TensorRT-RTX has no kernels yet. The library itself compares version, GPU and driver
    with the file, and ignores a file that differs.
    """

    def __init__(self, library: Any, engine: Any, path: Path) -> None:
        self._library = library
        self._engine = engine
        self._path = path
        self._cache = engine.create_runtime_config().create_runtime_cache()
        self._kept = read_entry(path)
        if self._kept is not None:
            self._cache.deserialize(self._kept)

    def new_context(self, *, captured: bool) -> Any:
        """An execution context without scratch memory of its own.

        If steps are `captured` the first step of a shape waits for its compiled kernels, as a
        capture keeps the kernels that it saw. Otherwise no step waits for them.
        """
        kinds = self._library.DynamicShapesKernelSpecializationStrategy
        strategies = self._library.ExecutionContextAllocationStrategy
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategies.USER_MANAGED)
        config.dynamic_shapes_kernel_specialization_strategy = (
            kinds.EAGER if captured else kinds.LAZY
        )
        config.set_runtime_cache(self._cache)
        return self._engine.create_execution_context(config)

    def keep(self) -> None:
        """Write the file, if kernels were compiled since."""
        made = self._cache.serialize()
        data = None if made is None else bytes(memoryview(made))
        if data is not None and data != self._kept:
            self._kept = data
            write_entry(self._path, data)


class ProfileContext:
    """One execution context that stays on one optimisation profile, and its newest bindings."""

    def __init__(self, context: Any, engine: Any, profile: int, log: Any) -> None:
        self.context = context
        self._engine = engine
        self._profile = profile
        self._log = log
        self._selected = False
        self._bound: Sequence[Binding] | None = None

    def select(self, stream: Stream) -> None:
        """Set the profile, once."""
        if self._selected:
            return
        if not self.context.set_optimization_profile_async(self._profile, stream.handle):
            raise failed(self._log, f"profile {self._profile} cannot be used", stream)
        self._selected = True

    def enqueue(self, bindings: Sequence[Binding], stream: Stream) -> None:
        """Queue one step; sets nothing when `bindings` is the tuple of the step before."""
        if bindings is not self._bound:
            self._bind(bindings, stream)
        if not self.context.execute_async_v3(stream.handle):
            raise failed(self._log, "the engine failed in a step", stream)

    def forget(self) -> None:
        """Bind anew in the next step."""
        self._bound = None

    def _bind(self, bindings: Sequence[Binding], stream: Stream) -> None:
        self._bound = None
        context = self.context
        for one in bindings:
            if one.direction == "input":
                self._check_range(one)
                if not context.set_input_shape(one.name, one.shape):
                    raise self._refused(one)
            if not context.set_tensor_address(one.name, one.tensor.address):
                raise failed(self._log, f"the address of {one.name} is refused", stream)
        self._bound = bindings

    def _check_range(self, one: Binding) -> None:
        # A plan of TensorRT 8.6 takes any shape here, and fails in the step without a name.
        if min(self._engine.get_tensor_shape(one.name), default=0) >= 0:
            return
        low, high = self._range(one.name)
        fits = len(low) == len(one.shape) and all(
            least <= size <= most for least, size, most in zip(low, one.shape, high, strict=True)
        )
        if not fits:
            raise self._refused(one)

    def _range(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        return tuple(low), tuple(high)

    def _refused(self, one: Binding) -> HearthError:
        low, high = self._range(one.name)
        self._log.take()
        return HearthError(
            "invalid_value",
            f"{one.name} has shape {one.shape} in a step; profile {self._profile} of the engine "
            f"serves {low} to {high}",
            one.name,
        )


def failed(log: Any, what: str, stream: Stream) -> HearthError:
    """The error for a call of TensorRT that failed, with the library's log.

    Its code is `device_lost` if the device was lost with the call.
    """
    text = log.take()
    try:
        stream.synchronize()
    except HearthError as lost:
        # A stream that is being captured cannot be waited for, which says nothing of the device.
        if lost.code == "device_lost":
            return lost
    code: Code = "out_of_memory" if "out of memory" in text.lower() else "executor_failed"
    return HearthError(code, f"{what}: {text}")


Recorder = Callable[[Stream, Callable[[], None]], CapturedRun]


class TensorRTEngine:
    """A TensorRT plan: one execution context a profile, all of them on one scratch memory.

    Steps go to one stream, so that no two contexts use the scratch memory at a time. `record`
    captures the work that a function queues into a CUDA graph.
    """

    def __init__(
        self,
        library: Any,
        engine: Any,
        log: Any,
        record: Recorder,
        *,
        plan: PlanRecord,
        cache: RuntimeCache | None = None,
    ) -> None:
        self._engine = engine
        self._old_api = has_old_memory_api(plan)
        self._log = log
        self._record = record
        self._cache = cache
        self._contexts = [
            ProfileContext(self._new_context(library, index), engine, index, log)
            for index in range(engine.num_optimization_profiles)
        ]
        self._active = self._contexts[0]
        self.io_tensors = _io_tensors(library, engine)
        self.required_context_memory = context_bytes(engine, old_api=self._old_api)

    @classmethod
    def open(cls, folder: Path, config: EngineConfig, context: CudaContext) -> "TensorRTEngine":
        """Load `model.plan` into a CUDA context, which must be current.

        Raises `engine_incompatible`, `engine_corrupt` or `out_of_memory`.
        """
        plan = config.plan
        library = load_library("tensorrt" if plan is None else plan.builder)
        gpu = context.properties
        plan = check_plan(config, library.__version__, gpu.name, gpu.compute_capability)
        log = make_log(library)
        engine = load_plan(library, log, folder, config)
        cache = None
        if plan.builder == "tensorrt_rtx":
            digest = config.files[PLAN_FILE].sha256
            cache = RuntimeCache(library, engine, cache_folder() / "kernels" / f"plan-{digest}.rtx")
        record = partial(record_graph, context)
        return cls(library, engine, log, record, plan=plan, cache=cache)

    def set_context_memory(self, memory: Tensor) -> None:
        """Use `memory` in every context; steps captured before are void."""
        for one in self._contexts:
            give_memory(one.context, memory.address, memory.nbytes, old_api=self._old_api)
            one.forget()

    def use_profile(self, profile: int, stream: Stream) -> None:
        """Take the context of `profile`; only its first use costs anything."""
        if not 0 <= profile < len(self._contexts):
            raise HearthError("invalid_value", f"the engine has no profile {profile}", "profile")
        self._contexts[profile].select(stream)
        self._active = self._contexts[profile]

    def run(self, bindings: Sequence[Binding], stream: Stream) -> None:
        """Queue one step; a tuple that was bound last costs no work per binding.

        Raises `invalid_value` with the binding and its range, `out_of_memory`, `executor_failed`.
        """
        self._active.enqueue(bindings, stream)

    def capture(self, bindings: Sequence[Binding], stream: Stream) -> CapturedRun:
        """A CUDA graph of the step, which runs once on the way."""
        context = self._active
        # The first run after a change of shapes does work that must not be captured.
        context.enqueue(bindings, stream)
        stream.synchronize()
        if self._cache is not None:
            self._cache.keep()
        return self._record(stream, lambda: context.enqueue(bindings, stream))

    def _new_context(self, library: Any, profile: int) -> Any:
        if self._cache is None:
            context = new_context(library, self._engine, old_api=self._old_api)
        else:
            context = self._cache.new_context(captured=profile > 0)
        if context is None:
            raise HearthError(
                "out_of_memory", f"no execution context: {self._log.take()}", PLAN_FILE
            )
        return context

    def close(self) -> None:
        """Free the contexts, then the engine; graphs that were captured must be closed before."""
        self._contexts.clear()
        del self._active, self._cache, self._engine


def record_graph(context: CudaContext, stream: Stream, work: Callable[[], None]) -> CapturedRun:
    """A CUDA graph of the launches that `work` queues on `stream`; raises `executor_failed`."""
    if not isinstance(stream, CudaStream):
        raise HearthError("internal", "only work on a stream of CUDA can be captured")
    with GraphCapture(context, stream) as capture:
        work()
    return capture.graph


def load_plan(library: Any, log: Any, folder: Path, config: EngineConfig) -> Any:
    """Deserialise `model.plan`; raises `engine_corrupt` or `out_of_memory`."""
    path = folder / PLAN_FILE
    record = config.files.get(PLAN_FILE)
    try:
        # The library is not to see a cut file: it trusts the lengths that it reads.
        if record is None or path.stat().st_size != record.bytes:
            raise _corrupt(path, "was cut or changed")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = open_runtime(library, log).deserialize_cuda_engine(plan)
    except (OSError, ValueError) as error:
        raise _corrupt(path, str(error)) from error
    if engine is not None:
        return engine
    reason = log.take()
    if "out of memory" in reason.lower():
        raise HearthError("out_of_memory", f"{path} does not fit into the GPU: {reason}", PLAN_FILE)
    raise _corrupt(path, reason)


def _corrupt(path: Path, reason: str) -> HearthError:
    return HearthError(
        "engine_corrupt", f"{path} cannot be loaded ({reason}): export the model again", PLAN_FILE
    )


def _io_tensors(library: Any, engine: Any) -> tuple[IOTensor, ...]:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    found = []
    for name in names:
        is_input = engine.get_tensor_mode(name) == library.TensorIOMode.INPUT
        dtype = numpy_dtype_of(name, engine.get_tensor_dtype(name))
        shape = tuple(None if size < 0 else size for size in engine.get_tensor_shape(name))
        found.append(IOTensor(name, "input" if is_input else "output", dtype, shape))
    return tuple(sorted(found, key=lambda one: one.direction))
