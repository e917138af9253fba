"""Check of a plan's record against the library and the GPU that it is to run on."""

from hearth.runtime.config import PlanRecord
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineConfig
from hearth.runtime.packages import version_numbers

# TensorRT 11 reads version-compatible plans from 10 on, 10 those of 8.6.
_OLDEST_READ_BY_11 = 10
_NAMES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
_RTX_SERVES, _RTX_SINCE = {(8, 0), (8, 6), (8, 9)}, (12, 0)
RTX_GPUS = "compute capability 8.0, 8.6, 8.9, or 12.0 and newer"
"""GPUs that plans of TensorRT-RTX run on."""


def built_by(plan: PlanRecord) -> str:
    """Name and version of the library that built a plan."""
    return f"{_NAMES[plan.builder]} {plan.tensorrt_version}"


def check_plan(
    config: EngineConfig, version: str, gpu_name: str, compute_capability: tuple[int, int]
) -> PlanRecord:
    """The record of the plan, when TensorRT `version` on this GPU can run it.

    A plan of TensorRT-RTX is for every GPU that it serves: the library compiles it where it runs.
    Raises `engine_corrupt` without a record and `engine_incompatible` naming what differs.
    """
    plan = config.plan
    if plan is None:
        raise HearthError("engine_corrupt", "nothing says what built the plan", "plan")
    if not _readable(plan, version):
        also = " or newer" if plan.version_compatible else ""
        raise _rebuild(
            config,
            f"was built by {built_by(plan)} and runs on that{also}; this is {version}",
            "tensorrt_version",
        )
    capability = "{}.{}".format(*compute_capability)
    if plan.builder == "tensorrt_rtx":
        if compute_capability in _RTX_SERVES or compute_capability >= _RTX_SINCE:
            return plan
        raise HearthError(
            "engine_incompatible",
            f"plans of TensorRT-RTX run on GPUs of {RTX_GPUS}; {gpu_name} has {capability}: export "
            "the model with --device cuda, for Hearth's own kernels",
            "compute_capability",
        )
    if plan.compute_capability not in ("", capability):
        raise _rebuild(
            config,
            f"was built for compute capability {plan.compute_capability}; {gpu_name} has "
            f"{capability}",
            "compute_capability",
        )
    if plan.gpu_name not in ("", gpu_name):
        raise _rebuild(config, f"was built for {plan.gpu_name}, this is {gpu_name}", "gpu_name")
    return plan


def _readable(plan: PlanRecord, version: str) -> bool:
    built, have = version_numbers(plan.tensorrt_version), version_numbers(version)
    if built == have or not plan.version_compatible:
        return built == have
    return have > built and (have[0] <= _OLDEST_READ_BY_11 or built[0] >= _OLDEST_READ_BY_11)


def _rebuild(config: EngineConfig, what: str, field: str) -> HearthError:
    return HearthError(
        "engine_incompatible",
        f"the plan of Hearth {config.hearth_version} {what}: export the model again with "
        "--backend tensorrt on the machine that is to run it",
        field,
    )
