"""`python -m tests.gpu.kernel_adapter_times [0.6b|4b ...]`: steps with an adapter and without.

The engine takes adapters up to rank 64; what is active has rank 0 (slots that are bound and hold
none), 4, 16 or 64. With `--profile` first, one step of each of `PROFILED` at rank 16 for ncu.
"""

import json
import sys
from typing import Any

import numpy as np

from runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from runtime.tensors.lora import RANK
from runtime.tensors.tensor import Tensor
from tests.gpu.kernel_times import PROFILED_LAYERS, Times

MOST, RANKS = 64, (0, 4, 16, 64)
STEPS = ((1, 1, 100, 256), (8, 1, 100, 256), (1, 8, 100, 256), (1, 60, 100, 256), (1, 512, 0, 1024))
PROFILED = STEPS[:2]
TARGETS = ("qkv", "o", "gate_up", "down")


def without(name: str, tensor: Tensor) -> Tensor:
    """The same input at rank 0."""
    shape = (tensor.shape[0], 0) if "_a_" in name else (0, tensor.shape[1])
    return tensor.part(name, 0, shape)


def time_model(device: CudaDevice, name: str) -> None:
    """Print a JSON line for each step."""
    times = Times(device, name, max_supported_lora_rank=MOST, lora_targets=TARGETS)
    driver = times.driver
    slots = {one: tensor for one, tensor in driver.tensors.items() if one.startswith("lora_")}
    random = np.random.default_rng(0)
    for one, tensor in slots.items():
        if one != RANK:
            numbers = random.standard_normal(tensor.shape, np.float32) * 0.01
            device.put(tensor, numbers.astype(tensor.dtype))
    nothing = {one: without(one, tensor) for one, tensor in slots.items() if one != RANK}
    for sizes in STEPS:
        made: dict[str, Any] = {"model": name, "rows, tokens, filled, slots": sizes}
        for bound in (False, True):
            driver.tensors |= slots if bound else nothing
            driver._known.clear()
            for rank in RANKS if bound else (0,):
                device.put(slots[RANK], np.array([rank], np.int32))
                figures = times.step(*sizes)
                key = f"rank {rank}" if bound else "without"
                made[key] = figures["in_a_row_ms"]
                made[f"nodes {key}"] = figures["nodes"]
        made["ratio 16"] = round(made["rank 16"] / made["without"], 3)
        sys.stdout.write(json.dumps(made) + "\n")
        sys.stdout.flush()
    driver.close()


def profile_model(device: CudaDevice, name: str) -> None:
    """Run steps that a profiler sees, with an adapter of rank 16."""
    options: dict[str, Any] = {"max_supported_lora_rank": MOST, "lora_targets": TARGETS}
    times = Times(device, name, layers=PROFILED_LAYERS, **options)
    device.put(times.driver.tensors[RANK], np.array([16], np.int32))
    for sizes in PROFILED:
        times.profile(*sizes)
    times.driver.close()


def main() -> None:
    """Time each model that is named."""
    names = sys.argv[1:]
    work = profile_model if "--profile" in names else time_model
    device = open_cuda_device()
    for name in [one for one in names if one != "--profile"] or ["0.6b"]:
        work(device, name)
    device.close()


if __name__ == "__main__":
    main()
