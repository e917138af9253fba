"""Token trees by the engine of kernels: each node has the bits that its path has, one by one."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hearth.runtime.config import DType
from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from tests.gpu.kernel_driver import QWEN3, SMALL_HEADS, KernelDriver
from tests.gpu.test_kernels import NAN_BYTE, same, text

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS = (40, 71, 130)
CASES: tuple[tuple[str, DType, Any], ...] = (
    ("qwen3", "float16", QWEN3),
    ("small-heads", "bfloat16", SMALL_HEADS),
)


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaDevice]:
    device = open_cuda_device()
    yield device
    device.close()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def driver(gpu: CudaDevice, request: pytest.FixtureRequest) -> Iterator[KernelDriver]:
    _, dtype, family = request.param
    made = KernelDriver(
        gpu,
        family,
        dtype,
        most_selected=128,
        enable_eagle_spec_decode=True,
        eagle_layers=(2, 0, family.layers),
        output_hidden_dim=3 * family.hidden,
        max_verify_tree_size=100,
        prefill_chunk=160,
    )
    yield made
    made.close()


def tree(nodes: int, seed: int) -> list[int]:
    """Parents of a random tree; node 0 is its root."""
    random = np.random.default_rng(seed)
    return [-1, *(int(random.integers(max(0, node - 9), node)) for node in range(1, nodes))]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.parametrize(("rows", "nodes"), [(1, 8), (3, 2), (1, 33), (2, 24), (3, 60), (1, 100)])
def test_a_node_has_the_bits_of_its_path(driver: KernelDriver, rows: int, nodes: int) -> None:
    prompts = [text(driver.family, PROMPTS[row], row) for row in range(rows)]
    parents = [tree(nodes, row) for row in range(rows)]
    ids = [text(driver.family, nodes, 10 + row) for row in range(rows)]
    driver.reset(NAN_BYTE)
    width = max(map(len, prompts))
    driver.step([[*one, *[0] * (width - len(one))] for one in prompts])
    driver.filled[:rows] = [len(one) for one in prompts]
    dims = driver.feed(ids, every=True, parents=parents)
    driver.engine.run(driver.bindings(dims), driver.device.stream)
    logits, hidden = driver.logits(dims), driver.hidden(dims)
    assert np.isfinite(logits).all()
    for row in range(rows):
        for node in {nodes - 1, nodes // 2}:
            path = path_to(parents[row], node)
            driver.reset(NAN_BYTE)
            driver.step([prompts[row]])
            given = [driver.step([[ids[row][one]]])[0, 0] for one in path]
            own = driver.hidden(driver.feed([[0]]))[0, 0]
            same(given[-1], logits[row, node])
            same(own, hidden[row, node])
            same(given[0], logits[row, 0])


def test_taps_of_a_chunk_are_those_of_single_tokens(driver: KernelDriver) -> None:
    ids = text(driver.family, 90)
    driver.reset()
    driver.step([ids])
    together = driver.hidden(driver.feed([ids]))[0]
    driver.reset(NAN_BYTE)
    for place, token in enumerate(ids):
        driver.step([[token]])
        if place % 13 == 0:
            same(driver.hidden(driver.feed([[0]]))[0, 0], together[place])
    embedded = driver.weights["embedding"][ids]
    hidden = driver.family.hidden
    same(together[:, hidden : 2 * hidden], embedded)
