"""Whole steps of the engine of kernels over quantised weights."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from hearth.runtime.config import DType
from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.weights.quantised import Kind, pack, round_weights, widen
from tests.gpu.kernel_driver import Array, Family, KernelDriver, random_weights, reference_logits
from tests.gpu.test_kernels import NAN_BYTE, TOLERANCE, same, text

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
FAMILY = Family(hidden=128, inner=320, heads=4, kv_heads=2, head_dim=64, qk_norm=True)
LENGTH = 140


class Stored(NamedTuple):
    """Tensors as a file has them, and what they mean."""

    tensors: dict[str, Array]
    meant: dict[str, Array]


def quantised(dtype: DType, kind: Kind, block: int, *, head: bool) -> Stored:
    """Random weights, of which matrices and perhaps the head are integers."""
    made, element = Stored({}, {}), numpy_dtype(dtype)
    for name, whole in random_weights(FAMILY, dtype).items():
        made.tensors[name] = made.meant[name] = whole
        if whole.ndim > 1 and name != "embedding" and (head or name != "head"):
            one = round_weights(whole.astype(np.float32), kind, block, element, signed=True)
            made.tensors[name] = pack(one.integers) if kind == "int4" else one.integers
            made.tensors[f"{name}.scale"] = one.scales
            made.meant[name] = widen(one, element)
    return made


CASES: list[tuple[DType, Kind, int, bool]] = [
    ("float16", "int4", 32, True),
    ("bfloat16", "int4", 64, False),
    ("float16", "int8", 64, False),
    ("bfloat16", "int8", 32, True),
]


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaDevice]:
    device = open_cuda_device()
    yield device
    device.close()


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(gpu: CudaDevice, request: pytest.FixtureRequest) -> Iterator[tuple[KernelDriver, Stored]]:
    dtype, kind, block, head = request.param
    stored = quantised(dtype, kind, block, head=head)
    made = KernelDriver(gpu, FAMILY, dtype, weights=stored.tensors, most_selected=256)
    yield made, stored
    made.close()


def test_logits_are_those_of_what_the_integers_mean(case: tuple[KernelDriver, Stored]) -> None:
    driver, stored = case
    ids = text(FAMILY, 90)
    wanted = reference_logits(FAMILY, stored.meant, ids)
    driver.reset(NAN_BYTE)
    first = driver.step([ids[:70]], every=True)[0]
    rest = [driver.step([[token]])[0, 0] for token in ids[70:]]
    worst = np.abs(np.concatenate([first, rest]) - wanted).max() / wanted.std()
    assert worst < TOLERANCE[driver.config.dtype]


@pytest.mark.parametrize("width", [1, 5, 33, 65, 129])
def test_chunks_of_any_width_give_the_same_bits(case: tuple[KernelDriver, Any], width: int) -> None:
    driver, _ = case
    ids = text(FAMILY, LENGTH)
    driver.reset()
    whole = driver.step([ids], every=True)[0]
    keys = driver.cache("k_cache_1", 1)[:, :, :LENGTH]
    driver.reset(NAN_BYTE)
    parts = [
        driver.step([ids[first : first + width]], every=True)[0]
        for first in range(0, LENGTH, width)
    ]
    same(driver.cache("k_cache_1", 1)[:, :, :LENGTH], keys)
    same(np.concatenate(parts), whole)


@pytest.mark.parametrize("batch", [3, 8])
def test_a_row_has_the_bits_that_it_has_alone(case: tuple[KernelDriver, Any], batch: int) -> None:
    driver, _ = case
    driver.reset(NAN_BYTE)
    steps = [text(FAMILY, batch, step) for step in range(6)]
    together = [driver.step([[token] for token in tokens])[:, 0] for tokens in steps]
    for row in range(batch):
        driver.reset(NAN_BYTE)
        for tokens, wanted in zip(steps, together, strict=True):
            same(driver.step([[tokens[row]]])[0, 0], wanted[row])
