"""Whether a plan fits the library and the GPU that it is to run on, by the record beside it."""

from runtime.config import PlanRecord
from runtime.errors import HearthError
from runtime.executor.engine import EngineConfig
from runtime.version import version_numbers

# TensorRT 11 reads version-compatible plans from 10 on, 10 those of 8.6.
_OLDEST_READ_BY_11 = 10
_NAMES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}


def check_plan(
    config: EngineConfig, version: str, gpu_name: str, compute_capability: tuple[int, int]
) -> PlanRecord:
    """The record of the plan, when TensorRT `version` on this GPU can run it.

    A plan of TensorRT-RTX is not made for one GPU: the library compiles it where it runs.
    Raises `engine_corrupt` without a record and `engine_incompatible` naming what differs.
    """
    plan = config.plan
    if plan is None:
        raise HearthError("engine_corrupt", "nothing says what built the plan", "plan")
    if not _readable(plan, version):
        also = " or newer" if plan.version_compatible else ""
        raise _rebuild(
            config,
            f"was built by {_NAMES[plan.builder]} {plan.tensorrt_version} and runs on that{also}; "
            f"this is {version}",
            "tensorrt_version",
        )
    if plan.builder == "tensorrt_rtx":
        return plan
    capability = "{}.{}".format(*compute_capability)
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
