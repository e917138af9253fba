"""Check of a deployment without serving it; the engine is loaded only for its known answer."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, get_args

import msgspec

from hearth.daemon.configuration.settings import Settings
from hearth.daemon.engine_settings import runtime_options
from hearth.daemon.gpu_facts import GPUFacts, check_gpu, gpu_facts, serving_library
from hearth.daemon.kernel_cache import KernelCache, kernel_cache
from hearth.daemon.vision_memory import most_tokens
from hearth.runtime.config import PlanRecord
from hearth.runtime.device.open import open_device
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions, physical_cores
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.generation.answer_check import AnswerReport
from hearth.runtime.generation.assembly import share_context_memory
from hearth.runtime.generation.budget import Budget, budgets_of, fit_deployment
from hearth.runtime.generation.deployment import DeploymentConfig, load_engines
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.image_processing.sizes import layout_of
from hearth.runtime.images import Picture
from hearth.runtime.memory.system import available_memory
from hearth.runtime.tensors.profiles import Selector
from hearth.runtime.tower_answer import TowerReport, check_tower_answer
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER, Family, VisionConfig, load_vision_config
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager, answer_of

T = TypeVar("T")
_LARGE = Picture("png", 1 << 14, 1 << 14)


class Tower(msgspec.Struct, frozen=True, kw_only=True):
    """The vision tower of a model that sees.

    A large square picture becomes `image_tokens`; 0 where even the smallest is too large.
    """

    family: Family
    layers: int
    dialect: str
    dtype: str
    plan: PlanRecord | None
    image_tokens: int
    answer: TowerReport | None = None


class BoundTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A binding of the engine, as the engine itself has it.

    `shapes` are the smallest, the typical and the largest of each profile, in elements; empty for
    one whose shape follows no step, as that of a table.
    """

    name: str
    dtype: str
    shapes: list[tuple[tuple[int, ...], ...]]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of what the daemon would use; memory in bytes, lengths in tokens.

    `weights` is the model whose external weights would be served, "" where the engine has its own;
    `max_lora_rank` the greatest rank of its adapters, 0 where it takes none.
    `reason` says why it cannot be, `code` and `field` name that for programs. `memory` is that of
    the engine's device; an engine of a GPU with memory of its own needs `host_memory` beside it.
    `library` is empty where none serves the engine, `kernels` None where it has none of its own.
    `outdated` says what may be wrong in an engine that an older Hearth exported, "" for nothing.
    `speculation` names how several tokens a step are tried, `chosen` why batch and capacity are
    smaller than exported where no setting asked. `answer` is that of the engine compared with the
    known one, "none" where there is none. `bindings` are those of the engine once it is loaded.
    """

    ok: bool
    reason: str | None
    code: str | None
    field: str | None
    engine: str
    device: str
    gpu: GPUFacts | None
    engine_kind: str
    library: str
    kernels: KernelCache | None
    plan: PlanRecord | None
    architecture: str
    dialect: str
    dtype: str
    kv_cache_dtype: str
    quantization: str
    weights: str
    max_lora_rank: int
    max_batch: int
    capacity: int
    chosen: str
    max_prompt_tokens: int
    threads: int
    outdated: str
    speculation: str
    memory: dict[str, int]
    memory_needed: int
    memory_available: int
    host_memory: dict[str, int]
    host_memory_needed: int
    host_memory_available: int
    answer: Literal["not compared", "none", "right", "wrong"] = "not compared"
    answer_report: AnswerReport | None = None
    tower: Tower | None = None
    bindings: list[BoundTensor] | None = None


def inspect_engine(
    settings: Settings,
    folder: Path,
    kernels_of: Callable[[Path, DeploymentConfig], KernelCache] = kernel_cache,
) -> Report:
    """Check folder, versions and memory; raises HearthError where nothing can be reported.

    `kernels_of` looks for the kernels of an engine of these.
    """
    options = runtime_options(settings)
    engines = load_engines(folder, options)
    deployment = engines.resolve(options)
    weights = ExternalWeightManager.open(folder, deployment.base, options.weights)
    config, host, refusals = deployment.base, available_memory(), list[HearthError]()
    # A missing library does not keep the GPU from being shown, nor the other way round.
    library = _tried(refusals, partial(serving_library, config)) or ""
    gpu = _tried(refusals, gpu_facts) if config.device == "cuda" else None
    if gpu is not None and library:
        _tried(refusals, partial(check_gpu, config, gpu, library))
    own = 0 if gpu is None else gpu.memory_free
    if gpu is not None or config.device == "cpu":
        fits = partial(fit_deployment, engines, options, host, own)
        deployment = _tried(refusals, fits) or deployment
    config, kernels = deployment.base, None
    if config.backend == "kernels" and gpu is not None and library:
        kernels = _tried(refusals, partial(kernels_of, folder, deployment))
    memory, *others = budgets_of(deployment, host, own)
    beside = others[0] if others else Budget({}, 0)
    refusal = refusals[0] if refusals else None
    return Report(
        ok=refusal is None,
        reason=refusal.message if refusal else None,
        code=refusal.code if refusal else None,
        field=refusal.field if refusal else None,
        engine=str(folder),
        device=config.device,
        gpu=gpu,
        engine_kind=config.backend,
        library=library,
        kernels=kernels,
        plan=config.plan,
        architecture=config.architecture,
        dialect=config.dialect,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.weight_quantization,
        weights=weights.source if weights else "",
        max_lora_rank=config.max_supported_lora_rank,
        max_batch=config.max_supported_batch_size,
        capacity=deployment.capacity,
        chosen=deployment.chosen,
        max_prompt_tokens=min(config.max_supported_input_length, deployment.capacity - 1),
        threads=settings.runtime.threads or (physical_cores() if config.device == "cpu" else 0),
        outdated=config.outdated,
        speculation=_speculation(deployment),
        memory=memory.parts,
        memory_needed=memory.needed,
        memory_available=memory.available if gpu or not others else 0,
        host_memory=beside.parts,
        host_memory_needed=beside.needed,
        host_memory_available=beside.available,
        tower=_tower(load_vision_config(folder), most_tokens(settings, config)),
    )


def _tower(config: VisionConfig | None, most: int) -> Tower | None:
    if config is None:
        return None
    large = _tried([], partial(layout_of, _LARGE, config, most))
    return Tower(
        family=config.family,
        layers=config.num_layers,
        dialect=config.dialect,
        dtype=config.dtype,
        plan=config.plan,
        image_tokens=0 if large is None else large.tokens,
    )


def with_answer(report: Report, settings: Settings, folder: Path) -> Report:
    """The report of an engine that can be served, once its known answer has been compared."""
    if not report.ok:
        return report
    try:
        options = runtime_options(settings)
        with closing(LLMInferenceRuntime.open(folder, options)) as runtime:
            answer = answer_of(folder, runtime.config, options.weights)
            if answer is None:
                return msgspec.structs.replace(report, answer="none")
            runtime.capture([1, runtime.max_batch])
            given = runtime.check_answer(answer)
        tower = _with_tower_answer(report, settings, folder)
    except HearthError as error:
        found = "wrong" if error.code == "wrong_answer" else report.answer
        why = {"reason": error.message, "code": error.code, "field": error.field}
        return msgspec.structs.replace(report, ok=False, answer=found, **why)
    return msgspec.structs.replace(report, answer="right", answer_report=given, tower=tower)


def with_bindings(report: Report, settings: Settings, folder: Path) -> Report:
    """The report of an engine that can be served, with what its engine says of itself."""
    if not report.ok:
        return report
    with closing(LLMInferenceRuntime.open(folder, runtime_options(settings))) as runtime:
        executor = runtime.executor
        names = [executor.io_tensor_name(index) for index in range(executor.num_io_tensors)]
        bindings = [_bound_tensor(executor, name) for name in names]
    return msgspec.structs.replace(report, bindings=bindings)


def _bound_tensor(executor: EngineExecutor, name: str) -> BoundTensor:
    def shapes(profile: int) -> tuple[tuple[int, ...], ...]:
        return tuple(executor.profile_shape(name, profile, one) for one in get_args(Selector))

    dtype = executor.binding_dtype(name).name
    profiles = range(executor.num_profiles) if executor.follows_steps(name) else ()
    return BoundTensor(name=name, dtype=dtype, shapes=[shapes(one) for one in profiles])


def _with_tower_answer(report: Report, settings: Settings, folder: Path) -> Tower | None:
    config = load_vision_config(folder)
    if report.tower is None or config is None:
        return None
    folder /= VISION_FOLDER
    options = EngineOptions(threads=settings.runtime.threads, spin=settings.runtime.spin)
    with (
        closing(open_device("cuda" if report.device == "cuda" else "cpu")) as device,
        closing(VisionRunner.open(folder, config, options, device)) as runner,
    ):
        share_context_memory([runner.executor], device)
        given = check_tower_answer(runner, folder)
    return msgspec.structs.replace(report.tower, answer=given)


def _tried(refusals: list[HearthError], look: Callable[[], T]) -> T | None:
    """Result of `look`; its refusal does not keep the rest from being shown."""
    try:
        return look()
    except HearthError as error:
        refusals.append(error)
    return None


def _speculation(deployment: DeploymentConfig) -> str:
    if deployment.method == "eagle":
        tree = deployment.drafting
        shape = f"top-k {tree.drafting_top_k}, step {tree.drafting_step}"
        return f"eagle, {shape}, {tree.tree_size} nodes"
    if deployment.method == "lookup":
        return f"lookup, {deployment.speculation.lookup_tokens} tokens"
    return "off"
