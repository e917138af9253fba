"""`python -m tools.gpu.kernel_adapter_times [0.6b|4b ...]`: steps with an adapter and without.

The engine takes adapters up to rank 64; what is active has rank 0 (slots that are bound and hold
none), 4, 16 or 64. With `--profile` one step of each of `PROFILED` at rank 16 for ncu.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hearth.bench.report import Record
from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.tensors.lora import RANK
from hearth.runtime.tensors.tensor import Tensor
from tools.gpu.kernel_times import PROFILED_LAYERS, SIZES, Times

MOST, RANKS = 64, (0, 4, 16, 64)
STEPS = ((1, 1, 100, 256), (8, 1, 100, 256), (1, 8, 100, 256), (1, 60, 100, 256), (1, 512, 0, 1024))
PROFILED = STEPS[:2]
TARGETS = ("qkv", "o", "gate_up", "down")


def without(name: str, tensor: Tensor) -> Tensor:
    """Input of the same shape with adapters of rank 0."""
    shape = (tensor.shape[0], 0) if "_a_" in name else (0, tensor.shape[1])
    return tensor.part(name, 0, shape)


def time_model(device: CudaDevice, name: str, record: Record) -> None:
    """Print a JSON line for each step, and record it by key."""
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
        made: dict[str, Any] = {}
        for bound in (False, True):
            driver.tensors |= slots if bound else nothing
            driver._known.clear()  # noqa: SLF001 - a driver of tests
            for rank in RANKS if bound else (0,):
                device.put(slots[RANK], np.array([rank], np.int32))
                figures = times.step(*sizes)
                key = f"rank_{rank}" if bound else "without"
                made |= {f"{key}_ms": figures["in_a_row_ms"], f"{key}_nodes": figures["nodes"]}
        made["ratio_16"] = made["rank_16_ms"] / made["without_ms"]
        record.keep({f"adapter/{name}/{' '.join(map(str, sizes))}": made})
        sys.stdout.write(json.dumps({"model": name, SIZES: sizes, **made}) + "\n")
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
    """Time each model that is named, or show it to a profiler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["0.6b"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--record", type=Path)
    chosen = parser.parse_args()
    program = ["python", "-m", "tools.gpu.kernel_adapter_times"]
    record = Record(chosen.record, [*program, *chosen.models])
    device = open_cuda_device()
    for name in chosen.models:
        if chosen.profile:
            profile_model(device, name)
        else:
            time_model(device, name, record)
    device.close()


if __name__ == "__main__":
    main()
