"""Chains by the kernel against the NumPy form."""

from typing import Any

import numpy as np
import pytest

from hearth.runtime.device.cpu.tree_ops import CpuTreeOps
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.device import ChainBuffers, StepBuffers, TreeBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device.cuda.tree_buffers import (
    FLOAT,
    HALF,
    HIDDEN,
    INT32,
    INT64,
    ROWS,
    VOCAB,
    assert_same,
    on_gpu,
    step_buffers,
    tree_buffers,
)

pytestmark = pytest.mark.gpu
NODES = 5


def chain_buffers(vocab: int, index: Any, *, mapped: bool, packed: bool) -> ChainBuffers:
    rng = np.random.default_rng(vocab)
    full_ids = Tensor("full ids", rng.integers(0, VOCAB, vocab).astype(np.int32))
    hidden = (ROWS, 1, HIDDEN)
    return ChainBuffers(
        step_buffers(1, np.dtype(index), masked=not packed, packed=packed),
        Tensor.zeros("logits", (ROWS, 1, vocab), FLOAT),
        Tensor.zeros("hidden out", hidden, HALF),
        Tensor("hidden in", np.full(hidden, 7, HALF)),
        full_ids if mapped else None,
        tree_buffers(NODES + 2),
        Tensor("base", rng.integers(0, 1000, ROWS).astype(index)),
    )


def device_chain(gpu: CudaDevice, host: ChainBuffers) -> ChainBuffers:
    step, trees = StepBuffers(*on_gpu(gpu, host.step)), TreeBuffers(*on_gpu(gpu, host.trees))
    one, two, three, four = on_gpu(gpu, host[1:5])
    return ChainBuffers(step, one, two, three, four, trees, *on_gpu(gpu, host[6:]))


@pytest.mark.parametrize("kind", ["plain", "ties", "not finite"])
@pytest.mark.parametrize(
    ("vocab", "index", "mapped", "packed"),
    [(40, INT64, False, True), (1024, INT32, True, False), (32_000, INT64, True, True)],
)
def test_each_level_is_a_node_and_feeds_the_next_step(
    gpu: CudaDevice, vocab: int, index: Any, kind: str, *, mapped: bool, packed: bool
) -> None:
    rng, cpu = np.random.default_rng(5), CpuTreeOps()
    host = chain_buffers(vocab, index, mapped=mapped or vocab > VOCAB, packed=packed)
    device = device_chain(gpu, host)
    for rows in (ROWS, 1, 3):
        for level in range(NODES - 1):
            logits = rng.standard_normal(host.logits.shape).astype(np.float32)
            if kind == "ties":
                logits = np.round(logits)
            if kind == "not finite":
                logits[rng.random(logits.shape) < 0.3] = np.nan
                logits[rng.random(logits.shape) < 0.1] = -np.inf
                logits[:, :, -1] = 3.0
            hidden = rng.standard_normal(host.hidden_states.shape).astype(np.float16)
            for on, buffers in ((None, host), (gpu, device)):
                for tensor, array in ((buffers.logits, logits), (buffers.hidden_states, hidden)):
                    if on is None:
                        tensor.array[...] = array
                    else:
                        on.put(tensor, array)
            cpu.draft_chain(host, rows, NODES, level)
            gpu.tree_ops.draft_chain(device, rows, NODES, level)
            assert_same(gpu, device.step, host.step)
            assert_same(gpu, device.trees, host.trees)
            assert_same(gpu, device[3:4], host[3:4])


def test_levels_that_a_chain_does_not_have_are_refused(gpu: CudaDevice) -> None:
    device = device_chain(gpu, chain_buffers(40, INT64, mapped=False, packed=True))
    for rows, nodes, level in (
        (0, NODES, 0),
        (ROWS + 1, NODES, 0),
        (1, NODES, NODES - 1),
        (1, 9, 0),
    ):
        with pytest.raises(HearthError, match="have no level"):
            gpu.tree_ops.draft_chain(device, rows, nodes, level)
