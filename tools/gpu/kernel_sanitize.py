"""`compute-sanitizer python -m tools.gpu.kernel_sanitize`: few steps of each kind of kernel.

With `large` those of matrices of the 0.6B shape, which have forms of their own, and of adapters.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hearth.runtime.config import DType
from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.tensors.lora import RANK
from tests.gpu.kernel_driver import QWEN2, SMALL_HEADS, Family, KernelDriver
from tests.gpu.test_kernels import NAN_BYTE, text
from tools.gpu.kernel_adapter_times import MOST, TARGETS
from tools.gpu.kernel_times import STEPS as PLAIN
from tools.gpu.kernel_times import WIDER, Times

Sizes = tuple[int, int, int, int]
CASES: tuple[tuple[Family, DType], ...] = ((QWEN2, "float16"), (SMALL_HEADS, "bfloat16"))
MANY = 10
"""Tokens of a row from which on its last one alone is looked at."""
STEPS = ([130], [1], [5], [1, 1, 1], [3, 3], [9, 9, 9, 9, 9, 9, 9, 9], [1] * 8, [40, 40])


def small(device: CudaDevice) -> None:
    """Run steps that are narrow and wide, fused and not, over caches that are partly filled."""
    for family, dtype in CASES:
        driver = KernelDriver(
            device,
            family._replace(layers=2),
            dtype,
            most_selected=64,
            enable_eagle_spec_decode=True,
            eagle_layers=(1,),
            output_hidden_dim=family.hidden,
            max_verify_tree_size=16,
            max_kv_cache_capacity=512,
            prefill_chunk=130,
        )
        driver.reset(NAN_BYTE)
        for rows in STEPS:
            ids = [text(family, count, row) for row, count in enumerate(rows)]
            parents = [[-1, *(max(0, one - 2) for one in range(1, count))] for count in rows]
            trees = parents if len(rows) > 1 else None
            driver.step(ids, every=max(rows) < MANY, parents=trees)
        driver.close()


def large(device: CudaDevice) -> None:
    """Run steps of one layer: plain ones, trees and prompts; the same of four bits; adapters."""
    adapted: dict[str, Any] = {"max_supported_lora_rank": MOST, "lora_targets": TARGETS}
    forms: tuple[tuple[str, dict[str, Any], Sequence[Sizes]], ...] = (
        ("0.6b", {"trees": True}, (*PLAIN[:3], *WIDER[:2], WIDER[3])),
        ("0.6b-int4", {}, PLAIN[:1]),
        ("0.6b", adapted, PLAIN[::2]),
    )
    for name, options, steps in forms:
        times = Times(device, name, layers=1, **options)
        if options is adapted:
            device.put(times.driver.tensors[RANK], np.array([16], np.int32))
        for sizes in steps:
            began = time.monotonic()
            times.driver.engine.run(times.driver.bindings(times.dims(*sizes)), device.stream)
            device.stream.synchronize()
            sys.stdout.write(f"{name} {sizes} {time.monotonic() - began:.1f} s\n")
            sys.stdout.flush()
        times.driver.close()


def main() -> None:
    """Run the small ones, or the large ones."""
    device = open_cuda_device()
    (large if "large" in sys.argv[1:] else small)(device)
    device.close()


if __name__ == "__main__":
    main()
