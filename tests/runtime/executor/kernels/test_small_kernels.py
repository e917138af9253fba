"""What is neither a product nor attention, and products with adapters, compiled for some GPUs."""

from collections.abc import Iterator

import numpy as np
import pytest

from hearth.runtime.device.cuda.programs import KernelRequest, WantedKernels
from hearth.runtime.executor.kernels.adapters import Adapter
from hearth.runtime.executor.kernels.draft_step import DraftPieces
from hearth.runtime.executor.kernels.products import Form, Products, Weight
from tests.runtime.executor.kernels.model_shapes import GPUS
from tests.runtime.executor.kernels.test_product_kernels import compiled, known

pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
pytestmark = pytest.mark.slow


def wanted() -> Iterator[KernelRequest]:
    kernels = WantedKernels()
    pieces = DraftPieces(kernels, "bfloat16")
    pieces.fuse(0, 0, 0, (0, 0), 0.0, 0, 8, 1, given=True)
    pieces.log_softmax(0, 0, 1, 9)
    three, two, one = (Adapter(0, 0, 0, 0, parts * 64, 64) for parts in (3, 2, 1))
    products = Products(kernels, GPUS["H200"], np.dtype(np.float16))
    weight = Weight(0, 1024, Form("float16"))
    for tokens in (1, 64, 512):
        shape = (1024, tokens)
        products.normed(0, 1, 0.0, [weight] * 3, *shape, 0, adapter=three)
        products.gated(0, 1, 0.0, weight, weight, *shape, 0, adapter=two)
        products.residual(0, weight, 9728, tokens, 0, adapter=one)
    # The others of a file are compiled with it.
    yield from {one.program: one for one in kernels.requests}.values()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_87", "sm_90", "sm_120"])
def test_small_kernels_spill_nothing(architecture: str) -> None:
    if architecture not in known():
        pytest.skip(f"this NVRTC lacks {architecture}")
    for request in wanted():
        if architecture != "sm_90" and request.file in ("gemm/gemv", "gemm/tiled"):
            continue  # They are planned for an H200.
        log = compiled(request, architecture)
        assert "0 bytes spill stores, 0 bytes spill loads" in log
        assert log.count("spill stores") == log.count(" 0 bytes spill stores"), log
