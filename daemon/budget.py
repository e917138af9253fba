"""Whether an engine fits into the memory that is free, before it is loaded."""

import msgspec

from daemon.gpu_facts import GPUFacts, gpu_facts
from runtime.decoding.deployment import DeploymentConfig
from runtime.errors import HearthError
from runtime.memory.cuda import cuda_weight_bytes, predict_cuda_host_memory
from runtime.memory.predicted import predict_draft_memory, predict_memory
from runtime.memory.system import available_memory


class Budget(msgspec.Struct, frozen=True):
    """Bytes by part that an engine will need, and bytes that are free; `where` names the memory."""

    parts: dict[str, int]
    available: int
    where: str = ""

    @property
    def needed(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())

    def check(self) -> None:
        """Raise `out_of_memory` when it does not fit."""
        if self.needed > self.available:
            raise HearthError(
                "out_of_memory",
                f"the engine needs {self.needed >> 20} MiB{self.where} and "
                f"{self.available >> 20} MiB are free: lower max_batch or capacity, or export "
                "with int8 or int4",
                "capacity",
            )


def predicted_parts(deployment: DeploymentConfig) -> dict[str, int]:
    """Bytes by part that the engines of `deployment` will need; nothing is asked."""
    config = deployment.base
    limits = {
        "max_batch": config.max_supported_batch_size,
        "capacity": config.max_kv_cache_capacity,
    }
    parts = predict_memory(config, **limits)
    if deployment.draft is not None:
        parts |= predict_draft_memory(deployment.draft, deployment.drafting, **limits)
        if config.plan is not None:
            # The steps of both plans share one context memory.
            parts["draft_scratch"] = max(0, parts["draft_scratch"] - parts["engine_scratch"])
    return parts


def budget_of(deployment: DeploymentConfig, gpu: GPUFacts | None = None) -> Budget:
    """The budget of a deployment on its device, now.

    Without `gpu` an engine of a GPU has it asked; raises `engine_incompatible` where there is none.
    """
    parts = predicted_parts(deployment)
    if deployment.base.device == "cpu":
        return Budget(parts, available_memory())
    gpu = gpu or gpu_facts()
    # The context that asked is gone by now, and the engine's takes its place.
    free = min(gpu.memory_total, gpu.memory_free + parts["context"])
    return Budget(parts, free, f" on {gpu.name}")


def host_budget_of(deployment: DeploymentConfig) -> Budget | None:
    """The budget of host memory beside that of a GPU; None for an engine of the CPU."""
    if deployment.base.device == "cpu":
        return None
    parts = predict_cuda_host_memory(deployment.base)
    if deployment.draft is not None:
        parts["draft_weights_while_loading"] = cuda_weight_bytes(deployment.draft)
    return Budget(parts, available_memory(), " on the host")
