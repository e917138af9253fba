"""`compute-sanitizer python -m tests.gpu.kernel_sanitize`: few steps of each kind of kernel."""

from runtime.config import DType
from runtime.device.cuda.cuda_device import open_cuda_device
from tests.gpu.kernel_driver import QWEN2, SMALL_HEADS, Family, KernelDriver
from tests.gpu.test_kernels import NAN_BYTE, text

CASES: tuple[tuple[Family, DType], ...] = ((QWEN2, "float16"), (SMALL_HEADS, "bfloat16"))
STEPS = ([130], [1], [5], [1, 1, 1], [3, 3], [9, 9, 9, 9, 9, 9, 9, 9], [1] * 8, [40, 40])


def main() -> None:
    """Run steps that are narrow and wide, fused and not, over caches that are partly filled."""
    device = open_cuda_device()
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
            driver.step(ids, every=max(rows) < 10, parents=trees)
        driver.close()
    device.close()


if __name__ == "__main__":
    main()
