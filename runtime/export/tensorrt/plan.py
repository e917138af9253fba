"""Makes the plan of an engine folder from the graph that lies in it."""

import hashlib
import json
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, get_args

import msgspec

from hearth.runtime.config import DRAFT_ARCHITECTURE, LLMEngineRunnerConfig, PlanRecord
from hearth.runtime.engine_folder import DATA_FILE, MODEL_FILE, PLAN_FILE
from hearth.runtime.errors import Code, HearthError
from hearth.runtime.export.options import Builder, ExportOptions, Feature, PlanOptions, has_feature
from hearth.runtime.export.tensorrt import builder
from hearth.runtime.export.writer import Progress
from hearth.runtime.packages import pip_install
from hearth.runtime.tensors.profiles import Profile, Selector, build_profiles
from hearth.runtime.tensors.registry import (
    TensorRegistry,
    build_registry_for_llm,
    build_registry_for_spec_decode_draft,
    build_registry_for_tower,
    build_tower_profiles,
)
from hearth.runtime.vision_config import VisionConfig

_LINES = 8
"""Lines of standard error that an error quotes."""
_CODES: dict[str, Code] = {
    "no_module": "unsupported_option",
    "no_gpu": "unsupported_option",
    "unsupported": "unsupported_option",
    "out_of_memory": "out_of_memory",
    "unwritable": "invalid_value",
}


class NoAttentionKernelError(HearthError):
    """The builder has no fused attention for this type, head size and GPU."""


def run_builder(
    python: str, job: dict[str, Any], progress: Progress | None = None
) -> dict[str, Any]:
    """Do one job in a process of its own, and return its last event.

    Raises `unsupported_option` when the builder cannot run here, `out_of_memory`, `invalid_value`
    when the plan cannot be written, or `model_unsupported` with what the builder said;
    `NoAttentionKernelError` is one of these.
    """
    last: dict[str, Any] = {}
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, also when the start fails
    with errors, _job_file(job) as path, _process(python, path, errors) as process:
        for line in process.stdout or ():
            event = _event(line)
            if event["event"] == "progress" and progress is not None:
                progress(f"plan: {event['stage']}"[:40], event["done"], max(event["total"], 1))
            if event["event"] in ("built", "failed"):
                last = event
        if last.get("event") != "built":
            raise _failure(last, process.wait(), errors)
    return last


@contextmanager
def _job_file(job: dict[str, Any]) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        yield file.name


@contextmanager
def _process(python: str, job: str, errors: Any) -> Iterator["subprocess.Popen[bytes]"]:
    command = [python, str(Path(builder.__file__)), job]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)  # noqa: S603 - our program
    except OSError as error:
        raise HearthError(
            "unsupported_option", f"{python} cannot be started: {error}", "builder_python"
        ) from error
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _event(line: bytes) -> dict[str, Any]:
    # The library prints lines of its own; only ours are JSON objects with an event.
    try:
        event = json.loads(line)
    except ValueError:
        return {"event": "noise"}
    return event if isinstance(event, dict) and "event" in event else {"event": "noise"}


def _failure(last: dict[str, Any], status: int, errors: IO[bytes]) -> HearthError:
    kind = last.get("kind", "died")
    message = last.get("message") or f"the builder {_how(status)}: {_tail(errors)}"
    if kind == "no_attention_kernel":
        return NoAttentionKernelError("model_unsupported", message, "dialect")
    field = "target" if kind == "unwritable" else "backend"
    return HearthError(_CODES.get(kind, "model_unsupported"), message, field)


def _how(status: int) -> str:
    if status >= 0:
        return f"ended without a word, exit code {status}"
    return f"was ended by signal {-status} ({signal.strsignal(-status)})"


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    return "; ".join([line.strip() for line in lines if line.strip()][-_LINES:])


Config = TypeVar("Config", LLMEngineRunnerConfig, VisionConfig)
_PIECE = 1 << 20
_REMEDY = (
    f"TensorRT-RTX comes by {pip_install('tensorrt_rtx')}, TensorRT with the system, and "
    "--builder-python names a Python that has one (docs/tensorrt.md)"
)


class FoundBuilder(NamedTuple):
    """TensorRT builder that was found, and its version."""

    builder: Builder
    version: str


def probe_builder(options: PlanOptions) -> FoundBuilder:
    """The builder that is asked for, or the first that is there where none is.

    Raises `unsupported_option` naming what was looked for when there is none.
    """
    names = get_args(Builder) if options.builder == "auto" else (options.builder,)
    try:
        found = run_builder(options.python, {"probe": names})
    except HearthError as error:
        if (error.code, error.field) != ("unsupported_option", "backend"):
            raise
        raise HearthError(error.code, f"{error.message}: {_REMEDY}", error.field) from error
    return FoundBuilder(found["module"], found["tensorrt_version"])


def settle_options(options: ExportOptions) -> ExportOptions:
    """With a plan, its builder and `auto` as what suits that; else the options unchanged.

    Raises `unsupported_option` when the builder is missing or cannot make what is asked for.
    """
    plan = options.plan
    if plan is None:
        return options
    builder, version = probe_builder(plan)
    plan = msgspec.structs.replace(plan, builder=builder)
    options = msgspec.structs.replace(options, plan=plan)
    if options.dialect == "auto":
        suits = options.dtype != "float32" and plan.kv_cache_dtype == "auto"
        native = suits and has_feature("native dialect", builder, version)
        options = msgspec.structs.replace(options, dialect="native" if native else "classic")
    if plan.kv_cache_dtype == "auto" and not has_feature("strong typing", builder, version):
        plan = msgspec.structs.replace(plan, kv_cache_dtype="float32")
        options = msgspec.structs.replace(options, plan=plan)
    _check_builder(options, plan, FoundBuilder(builder, version))
    return options


def build_or_fall_back(
    folder: Path,
    config: Config,
    options: PlanOptions,
    write_graph: Callable[[Config], None],
    progress: Progress | None = None,
) -> Config:
    """Build the plan; without a fused attention, build it of the classic dialect.

    `write_graph` writes the graph of a configuration into the folder. The dialect of the returned
    configuration says which way it went.
    """
    try:
        return build_plan(folder, config, options, progress)
    except NoAttentionKernelError:
        if config.dialect == "classic":
            raise
    decoder = isinstance(config, LLMEngineRunnerConfig)
    also = {"use_trt_native_ops": False} if decoder else {}
    config = msgspec.structs.replace(config, dialect="classic", **also)
    write_graph(config)
    return build_plan(folder, config, options, progress)


def _check_builder(options: ExportOptions, plan: PlanOptions, found: FoundBuilder) -> None:
    def lacks(feature: Feature) -> bool:
        return not has_feature(feature, *found)

    native, library = options.dialect == "native", f"TensorRT {found.version}"
    wide = plan.kv_cache_dtype not in ("auto", options.dtype)
    faults = {
        f"{library} does not read the native dialect, 10.15 is the first: choose classic": (
            native and lacks("native dialect") and "dialect"
        ),
        "the native dialect has caches of the engine's own type: choose classic": (
            native and wide and "kv_cache_dtype"
        ),
        f"{library} has no bfloat16: choose float16": (
            options.dtype == "bfloat16" and lacks("bfloat16") and "dtype"
        ),
        f"{library} has no blocks of int4, 10 is the first: leave the weights as they are": (
            {options.quantization, options.head_weights} != {"none"}
            and lacks("int4")
            and "quantization"
        ),
        "TensorRT-RTX makes plans for its own version alone": (
            plan.version_compatible and found.builder == "tensorrt_rtx" and "version_compatible"
        ),
        f"{library} makes plans of drafts that cannot be opened, 10 is the first: leave it out": (
            options.draft is not None and lacks("drafts") and "draft"
        ),
    }
    for what, field in faults.items():
        if field:
            raise HearthError("unsupported_option", what, field)


def build_plan(
    folder: Path,
    config: Config,
    options: PlanOptions,
    progress: Progress | None = None,
) -> Config:
    """Build `model.plan`, drop the graph, and return the configuration with the plan's record.

    Raises the errors of `run_builder`; the graph then stays.
    """
    facts = run_builder(options.python, plan_job(folder, config, options), progress)
    record = PlanRecord(
        tensorrt_version=facts["tensorrt_version"],
        builder=facts["module"],
        version_compatible=options.version_compatible,
        gpu_name=facts["gpu_name"],
        compute_capability=facts["compute_capability"],
        graph_sha256=graph_digest(folder),
        scratch_bytes=_scratch_bytes(folder, options) if facts["gpu_name"] else None,
    )
    # The plan holds the weights; the table that a tied head reads stays for the embedding.
    for name in (MODEL_FILE, DATA_FILE):
        (folder / name).unlink(missing_ok=True)
    return msgspec.structs.replace(config, plan=record)


def _scratch_bytes(folder: Path, options: PlanOptions) -> int | None:
    """Scratch memory of the plan's steps in bytes; None where memory is short now.

    Raises `model_unsupported` when the plan cannot be opened: no daemon could either.
    """
    job = {"module": options.builder, "measure": str(folder / PLAN_FILE)}
    try:
        return int(run_builder(options.python, job)["scratch_bytes"])
    except HearthError as error:
        if error.code != "out_of_memory":
            raise
    return None


def plan_job(
    folder: Path, config: LLMEngineRunnerConfig | VisionConfig, options: PlanOptions
) -> dict[str, Any]:
    """Job description for the builder process."""
    cache = options.timing_cache
    return {
        "module": options.builder,
        "graph": str(folder / MODEL_FILE),
        "output": str(folder / PLAN_FILE),
        "timing_cache": None if cache is None else str(cache),
        "profiles": _profile_table(*_shapes(config)),
        "precision": config.dtype,
        "version_compatible": options.version_compatible,
        "workspace_bytes": options.workspace_bytes,
        "optimization_level": options.optimization_level,
    }


def _shapes(
    config: LLMEngineRunnerConfig | VisionConfig,
) -> tuple[TensorRegistry, tuple[Profile, ...]]:
    if isinstance(config, VisionConfig):
        return build_registry_for_tower(config), build_tower_profiles(config)
    is_draft = config.architecture == DRAFT_ARCHITECTURE
    build = build_registry_for_spec_decode_draft if is_draft else build_registry_for_llm
    return build(config), build_profiles(config)


def _profile_table(
    registry: TensorRegistry, profiles: tuple[Profile, ...]
) -> list[dict[str, list[list[int]]]]:
    """For each profile, by input: the smallest, typical and largest shape, by the registry.

    The rotary tables of a decoder are absent: their shape is fixed in the graph.
    """
    inputs = [one for one in registry.specs if one.direction == "input"]
    return [
        {
            spec.name: [list(spec.resolve(profile.select(one))) for one in get_args(Selector)]
            for spec in inputs
        }
        for profile in profiles
    ]


def graph_digest(folder: Path) -> str:
    """SHA-256 over the graph and, behind it, its data file; a graph without weights has none."""
    digest = hashlib.sha256()
    for path in (folder / MODEL_FILE, folder / DATA_FILE):
        if not path.exists():
            continue
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()
