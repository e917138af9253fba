import mmap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runtime.cache_folder import cache_folder
from runtime.config import PlanRecord
from runtime.device.cuda.context import CudaContext
from runtime.device.cuda.graph import GraphCapture
from runtime.device.cuda.stream import CudaStream
from runtime.device.stream import Stream
from runtime.engine_folder import PLAN_FILE
from runtime.errors import HearthError
from runtime.executor.engine import Binding, CapturedRun, EngineConfig, IOTensor
from runtime.executor.tensorrt.library import (
    context_bytes,
    give_memory,
    has_old_memory_api,
    load_library,
    make_log,
    new_context,
    numpy_dtype_of,
    open_runtime,
)
from runtime.executor.tensorrt.manifest import check_plan
from runtime.executor.tensorrt.profile_context import ProfileContext
from runtime.executor.tensorrt.rtx import RuntimeCache
from runtime.tensors.tensor import Tensor

Recorder = Callable[[Stream, Callable[[], None]], CapturedRun]


class TensorRTEngine:
    """A TensorRT plan: one execution context a profile, all of them on one scratch memory.

    Steps go to one stream, so that no two contexts use the scratch memory at a time. `record`
    captures into a CUDA graph what a function queues.
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
    """A CUDA graph of what `work` queues on `stream`; raises `executor_failed`."""
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
