"""Builds one TensorRT plan: `python builder.py JOB.json`, events as JSON lines on standard output.

A job with `probe` asks which of the modules that it names is there, and for its version alone, one
with `measure` for the memory that the steps of a finished plan take.

This file imports nothing else of Hearth, so that it runs in whatever Python the wanted TensorRT
lives in: 8.6 and newer, and TensorRT-RTX. The last event is `built` or `failed`, never neither.
"""

import ctypes
import faulthandler
import importlib
import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

# <sys/prctl.h>
_PR_SET_PDEATHSIG = 1
# <cuda.h>: of `CUdevice_attribute`.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_NAME_BYTES = 256
# What builders say when a fused attention has no kernel for its type, head size or GPU.
_NO_KERNEL = ("dedicated kernel", "_gemm_mha", "Attention operation was not supported")
_NO_MEMORY = ("out of memory", "OutOfMemory", "insufficient memory")
_NO_GPU = ("CUDA initialization failure", "no CUDA-capable device", "factory function returned")


def emit(event: str, **fields: Any) -> None:
    """Print one event."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


class JobError(Exception):
    """A named failure: `kind` for programs, the message for people."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def make_logger(trt: Any) -> Any:
    """A TensorRT logger that keeps errors in `messages` and emits warnings."""

    class Logger(trt.ILogger):  # type: ignore[misc] # the module is chosen at run time
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.messages.append(message)
            elif severity == trt.ILogger.WARNING:
                emit("warning", message=message)

    return Logger()


def make_monitor(trt: Any) -> Any:
    """A progress monitor that emits the steps of every phase; None before TensorRT 10."""
    if not hasattr(trt, "IProgressMonitor"):
        return None

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc] # likewise
        def __init__(self) -> None:
            super().__init__()
            self._totals: dict[str, int] = {}

        def phase_start(self, phase: str, _parent: str | None, steps: int) -> None:
            self._totals[phase] = steps
            emit("progress", stage=phase, done=0, total=steps)

        def phase_finish(self, phase: str) -> None:
            total = self._totals.pop(phase, 0)
            emit("progress", stage=phase, done=total, total=total)

        def step_complete(self, phase: str, step: int) -> bool:
            emit("progress", stage=phase, done=step + 1, total=self._totals.get(phase, step + 1))
            return True

    return Monitor()


def fail(logger: Any, kind: str, what: str) -> NoReturn:
    """Raise `JobError`, of a more telling kind where the logged errors give one."""
    text = "; ".join(logger.messages[-3:]) or "no reason was given"
    for known, marks in (
        ("no_attention_kernel", _NO_KERNEL),
        ("out_of_memory", _NO_MEMORY),
        ("no_gpu", _NO_GPU),
    ):
        if any(mark in message for mark in marks for message in logger.messages):
            kind = known
    raise JobError(kind, f"{what}: {text}")


def make_builder(trt: Any, logger: Any) -> Any:
    """The builder; without a GPU TensorRT has none, TensorRT-RTX has."""
    try:
        return trt.Builder(logger)
    except TypeError as error:
        logger.messages.append(str(error))
        fail(logger, "no_gpu", "the builder cannot start")


def make_network(trt: Any, builder: Any) -> tuple[Any, bool]:
    """An empty network, strongly typed where the version has that, and whether it is."""
    flags = trt.NetworkDefinitionCreationFlag
    if hasattr(flags, "STRONGLY_TYPED"):
        return builder.create_network(1 << int(flags.STRONGLY_TYPED)), True
    return builder.create_network(1 << int(flags.EXPLICIT_BATCH)), False


def parse(trt: Any, network: Any, logger: Any, graph: str) -> None:
    """Read the ONNX file and its weights."""
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(graph):
        return
    for index in range(parser.num_errors):
        logger.messages.append(str(parser.get_error(index).desc()))
    fail(logger, "parse", "the graph cannot be read")


def set_precision(trt: Any, network: Any, config: Any, precision: str) -> int:
    """Allow a weakly typed network the graph's narrow type, keeping its float32 part.

    Returns how many layers are held in float32: normalisation, whose squares overflow a half.
    """
    flag = {"float16": "FP16", "bfloat16": "BF16", "float32": ""}[precision]
    if not flag:
        return 0
    if not hasattr(trt.BuilderFlag, flag):
        raise JobError("unsupported", f"TensorRT {trt.__version__} has no {precision}")
    config.set_flag(getattr(trt.BuilderFlag, flag))
    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    wide: set[str] = set()
    held = 0
    for index in range(network.num_layers):
        held += hold_in_float32(trt, network.get_layer(index), wide)
    return held


def hold_in_float32(trt: Any, layer: Any, wide: set[str]) -> bool:
    """Fix the type of a layer between a cast to float32 and the next cast; `wide` are its tensors.

    What a weakly typed network says of a tensor's type before it is built is not to be trusted.
    """
    outputs = [layer.get_output(index) for index in range(layer.num_outputs)]
    if layer.type == trt.LayerType.CAST:
        layer.__class__ = trt.ICastLayer
        if layer.to_type == trt.float32:
            wide.update(tensor.name for tensor in outputs)
        return False
    inputs = [layer.get_input(index) for index in range(layer.num_inputs)]
    if not any(tensor is not None and tensor.name in wide for tensor in inputs):
        return False
    wide.update(tensor.name for tensor in outputs)
    layer.precision = trt.float32
    for index in range(layer.num_outputs):
        layer.set_output_type(index, trt.float32)
    return True


def add_profiles(builder: Any, config: Any, profiles: list[dict[str, list[list[int]]]]) -> None:
    """Add one optimisation profile an entry: min, opt and max shape of every input."""
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, (smallest, typical, largest) in shapes.items():
            profile.set_shape(name, tuple(smallest), tuple(typical), tuple(largest))
        if config.add_optimization_profile(profile) < 0:
            raise JobError("profile", "the builder refuses a profile")


def open_timing_cache(config: Any, path: str | None) -> Any:
    """The timing cache that the build fills, or None without a path.

    It starts from the tactics timed before; one of another version or GPU is begun anew.
    """
    if path is None:
        return None
    cache = config.create_timing_cache(read_timings(Path(path)))
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        emit("warning", message="the timing cache is of another TensorRT or GPU: begun anew")
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def read_timings(path: Path) -> bytes:
    """Read the timing cache of an earlier build; empty where there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        emit("warning", message=f"the timing cache cannot be read, so all is timed: {error}")
        return b""


def keep_timings(path: Path, cache: Any) -> None:
    """Write the timings for later builds; a plan that is made is not lost with them."""
    try:
        write_whole(path, cache.serialize())
    except (OSError, TypeError) as error:
        emit("warning", message=f"the timing cache cannot be kept: {error}")


def write_plan(path: Path, plan: Any) -> None:
    """Write the plan; raises `JobError` where that fails."""
    try:
        write_whole(path, plan)
    except OSError as error:
        raise JobError("unwritable", f"the plan cannot be written: {error}") from error


def write_whole(path: Path, data: Any) -> None:
    """Write a file beside its place and move it there; of one that fails nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(memoryview(data))
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def set_options(trt: Any, config: Any, job: dict[str, Any]) -> None:
    """Put the options of the job that do not depend on the network into the configuration."""
    if job["workspace_bytes"]:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job["workspace_bytes"])
    if job["optimization_level"] is not None:
        config.builder_optimization_level = job["optimization_level"]
    if job["version_compatible"]:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    # Full float32 where the model is float32: TF32, on by default, has 10 bits of it.
    config.clear_flag(trt.BuilderFlag.TF32)
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        # Else TensorRT-RTX may allocate in a step, which a capture forbids.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    monitor = make_monitor(trt)
    if monitor is not None:
        config.progress_monitor = monitor


def gpu_identity() -> tuple[str, str]:
    """Name and compute capability of the GPU that is built on; empty where there is none.

    The driver is asked without bindings, which the builder's Python may lack.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "", ""
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetName(name, _NAME_BYTES, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    )
    return ("", "") if failed else (name.value.decode(), f"{major.value}.{minor.value}")


def open_plan(trt: Any, logger: Any, plan: Any) -> Any:
    """The engine of a plan, on this GPU."""
    try:
        runtime = trt.Runtime(logger)
    except TypeError:  # What the bindings make of a null pointer.
        fail(logger, "unusable", "the runtime cannot start")
    if hasattr(runtime, "engine_host_code_allowed"):
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        fail(logger, "unusable", "the plan cannot be opened")
    return engine


def measure(trt: Any, path: Path, kept: list[Any]) -> int:
    """Bytes of scratch memory that serve every profile of a plan."""
    logger = make_logger(trt)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        engine = open_plan(trt, logger, plan)
    kept += [logger, engine]
    if hasattr(engine, "get_device_memory_size_for_profile_v2"):
        profiles = range(engine.num_optimization_profiles)
        return max(int(engine.get_device_memory_size_for_profile_v2(one)) for one in profiles)
    return int(engine.device_memory_size)


def load_module(name: str) -> Any:
    """Import TensorRT, of a whole installation or of the wheel of its bindings."""
    try:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            return importlib.import_module(f"{name}_bindings")
    except (ImportError, OSError) as error:
        raise JobError("no_module", f"{name} cannot be imported: {error}") from error


def probe(names: list[str]) -> dict[str, Any]:
    """The first of the modules that can be imported, and its version."""
    name, *others = names
    try:
        return {"module": name, "tensorrt_version": load_module(name).__version__}
    except JobError as error:
        if not others:
            raise
        missing = str(error)
    try:
        return probe(others)
    except JobError as error:
        raise JobError(error.kind, f"{missing}; {error}") from error


def build(job: dict[str, Any], kept: list[Any]) -> dict[str, Any]:
    """Do the job; what the plan was built by and for, or what was asked instead of a build.

    The library's objects go to `kept`, and live as long as the caller lets them.
    """
    began = time.monotonic()
    if job.get("probe"):
        return probe(job["probe"])
    trt = load_module(job["module"])
    if job.get("measure"):
        return {"scratch_bytes": measure(trt, Path(job["measure"]), kept)}
    logger = make_logger(trt)
    builder = make_builder(trt, logger)
    network, strongly_typed = make_network(trt, builder)
    parse(trt, network, logger, job["graph"])
    config = builder.create_builder_config()
    held = 0 if strongly_typed else set_precision(trt, network, config, job["precision"])
    set_options(trt, config, job)
    add_profiles(builder, config, job["profiles"])
    cache = open_timing_cache(config, job["timing_cache"])
    kept += [logger, builder, network, config, cache]
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        fail(logger, "build", "the plan cannot be built")
    write_plan(Path(job["output"]), plan)
    if cache is not None:
        keep_timings(Path(job["timing_cache"]), cache)
    name, capability = gpu_identity()
    return {
        "module": job["module"],
        "tensorrt_version": trt.__version__,
        "strongly_typed": strongly_typed,
        "float32_layers": held,
        "gpu_name": name,
        "compute_capability": capability,
        "plan_bytes": Path(job["output"]).stat().st_size,
        "seconds": round(time.monotonic() - began, 1),
    }


def main(arguments: list[str], kept: list[Any]) -> int:
    """Read the job file and report; 0 when the plan was written."""
    try:
        facts = build(json.loads(Path(arguments[0]).read_text()), kept)
    except JobError as error:
        emit("failed", kind=error.kind, message=str(error))
        return 1
    except Exception as error:  # noqa: BLE001 - the parent waits for a last event
        emit("failed", kind="internal", message=f"{type(error).__name__}: {error}")
        return 1
    emit("built", **facts)
    return 0


def run() -> NoReturn:
    """Be the process: what ends it from within leaves a trace on standard error."""
    faulthandler.enable()
    # Nobody waits any more when the export is killed, and a build holds a GPU for long.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    kept: list[Any] = []
    status = main(sys.argv[1:], kept)
    # A builder of TensorRT 8.6 with a timing cache died behind the written cache and before its
    # last event. By now all is written, so none of the library's objects is taken apart.
    os._exit(status)


if __name__ == "__main__":
    run()
