from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hearth.runtime.device.cpu.tree_ops import CpuTreeOps
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.device import ProposalBuffers, StepBuffers, TreeBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device.cuda.tree_buffers import (
    FLOAT,
    HALF,
    HIDDEN,
    INT32,
    INT64,
    ROWS,
    Shape,
    assert_same,
    on_gpu,
    proposal_buffers,
    random_logits,
    random_trees,
    step_buffers,
    tree_buffers,
)

pytestmark = pytest.mark.gpu
BFLOAT = np.dtype(ml_dtypes.bfloat16)
CPU = CpuTreeOps()
SHAPES = [
    Shape(1, 10, 6, 100),
    Shape(8, 10, 6, 2049),
    Shape(3, 4, 3, 4),
    Shape(8, 1, 4, 1),
    Shape(2, 8, 1, 4097),
    Shape(2, 40, 3, 70),
    Shape(1, 10, 2, 32000),
    Shape(3, 10, 2, 151936),
]


@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 60, 128])
@pytest.mark.parametrize("index", [INT32, INT64])
@pytest.mark.parametrize(("masked", "packed"), [(True, False), (False, True), (False, False)])
def test_planted_trees_feed_a_verification(
    gpu: CudaDevice, width: int, index: np.dtype[Any], *, masked: bool, packed: bool
) -> None:
    rng = np.random.default_rng(width)
    host = step_buffers(width, index, masked=masked, packed=packed)
    trees = tree_buffers(width)
    device, planted = StepBuffers(*on_gpu(gpu, host)), TreeBuffers(*on_gpu(gpu, trees))
    for rows in (1, 3, 8):
        for size in {1, (width + 1) // 2, width}:
            ids, parents = random_trees(rng, rows, size)
            for ops, steps, target in ((CPU, host, trees), (gpu.tree_ops, device, planted)):
                ops.upload_tree(target, ids, parents)
                ops.feed_verify(steps, target, rows, size)
            assert_same(gpu, planted, trees)
            assert_same(gpu, device, host)


class Proposals:
    """A proposal by NumPy and one on the device, from the same draft outputs."""

    def __init__(self, gpu: CudaDevice, shape: Shape, data: np.dtype[Any], kind: str) -> None:
        self.gpu, self.shape, self.kind = gpu, shape, kind
        self.rng = np.random.default_rng(shape.top_k)
        self.host = proposal_buffers(shape, data, mapped=kind == "ties")
        self.device = ProposalBuffers(*on_gpu(gpu, self.host))
        self.steps = step_buffers(shape.slots, INT64, packed=kind != "plain")
        self.device_steps = StepBuffers(*on_gpu(gpu, self.steps))

    def grow(self) -> None:
        rows, top_k, steps, _ = self.shape
        self._draft(1)
        for ops, proposal in ((CPU, self.host), (self.gpu.tree_ops, self.device)):
            ops.begin_proposal(proposal, rows, top_k)
        for level in range(steps - 1):
            self._feed((rows, (level + 1) * top_k, top_k))
            self._draft(top_k)
            last = level == steps - 2
            for ops, proposal in ((CPU, self.host), (self.gpu.tree_ops, self.device)):
                ops.extend_proposal(proposal, rows, top_k, level, last=last)
            assert_same(self.gpu, self.device, self.host)
        assert_same(self.gpu, self.device, self.host)

    def finish(self, width: int) -> None:
        speculating = (self.rng.random(self.shape.rows) < 0.8).tolist()
        host = tree_buffers(width)
        device = TreeBuffers(*on_gpu(self.gpu, host))
        CPU.finish_proposal(self.host, host, speculating, width)
        self.gpu.tree_ops.finish_proposal(self.device, device, speculating, width)
        assert_same(self.gpu, device, host)

    def _feed(self, shape: tuple[int, int, int]) -> None:
        lengths = Tensor("lengths", self.rng.integers(0, 99, ROWS))
        CPU.feed_proposal(self.steps, self.host, lengths, shape)
        on_device = self.gpu.constant("lengths", lengths.array)
        self.gpu.tree_ops.feed_proposal(self.device_steps, self.device, on_device, shape)
        assert_same(self.gpu, self.device_steps, self.steps)

    def _draft(self, selected: int) -> None:
        rows, vocab = self.shape.rows, self.shape.vocab
        logits = random_logits(self.rng, self.kind, (rows, selected, vocab))
        hidden = self.rng.standard_normal((rows, selected, HIDDEN))
        hidden = hidden.astype(self.host.hidden_states.dtype)
        self.host.logits.view(logits.shape)[...] = logits
        self.host.hidden_states.view(hidden.shape)[...] = hidden
        self.gpu.ring.upload(self.device.logits.address, logits)
        self.gpu.ring.upload(self.device.hidden_states.address, hidden)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["plain", "ties", "odd"])
def test_proposals_agree_with_numpy_node_for_node(gpu: CudaDevice, shape: Shape, kind: str) -> None:
    proposals = Proposals(gpu, shape, FLOAT if kind == "plain" else HALF, kind)
    for _ in range(2):
        proposals.grow()
        for width in sorted({1, 2, min(16, shape.entries), min(60, shape.entries)}):
            proposals.finish(width)
    proposals.finish(shape.entries)


def test_a_tree_that_was_never_planted_ends_at_its_root(gpu: CudaDevice) -> None:
    steps = StepBuffers(*on_gpu(gpu, step_buffers(4, INT64)))
    trees = TreeBuffers(*(gpu.zeros("tree", (ROWS, 4), INT32) for _ in range(2)))
    gpu.tree_ops.feed_verify(steps, trees, 1, 4)
    start = int(gpu.read(steps.lengths)[0])
    assert gpu.read(steps.attention_pos_id)[0].tolist() == [start] + [start + 1] * 3


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize("size", [1, 33, 64])
def test_rows_are_gathered(gpu: CudaDevice, dtype: np.dtype[Any], size: int) -> None:
    rng = np.random.default_rng(size)
    source = Tensor("source", rng.standard_normal((5, 9, size)).astype(dtype))
    out = Tensor("out", np.ones((4, 7, size), dtype))
    device = [gpu.constant(tensor.name, tensor.array) for tensor in (source, out)]
    for width in (1, 9):
        for index in (rng.integers(-1, width, (4, 7)), np.full((2, 3), -1)):
            CPU.gather_rows(source, width, index.astype(np.int32), out)
            gpu.tree_ops.gather_rows(device[0], width, index.astype(np.int32), device[1])
            assert gpu.read(device[1]).tobytes() == out.array.tobytes()


def test_what_does_not_fit_is_refused(gpu: CudaDevice) -> None:
    shape = Shape(2, 4, 3, 30)
    proposal = ProposalBuffers(*on_gpu(gpu, proposal_buffers(shape, HALF, mapped=False)))
    trees = TreeBuffers(*on_gpu(gpu, tree_buffers(8)))
    steps = StepBuffers(*on_gpu(gpu, step_buffers(8, INT64)))
    ops = gpu.tree_ops
    with pytest.raises(HearthError, match="no proposal of 5 tokens"):
        ops.begin_proposal(proposal, 2, 5)
    with pytest.raises(HearthError, match="no level 2"):
        ops.extend_proposal(proposal, 2, 4, 2, last=True)
    with pytest.raises(HearthError, match="trees of 60 nodes"):
        ops.finish_proposal(proposal, trees, [True], 60)
    with pytest.raises(HearthError, match="9 nodes exceed"):
        ops.feed_verify(steps, trees, 1, 9)
    with pytest.raises(HearthError, match="is no index"):
        ops.feed_proposal(steps, proposal, gpu.zeros("lengths", (8,), INT32), (1, 4, 4))
    with pytest.raises(HearthError, match="cannot gather"):
        ops.gather_rows(steps.inputs_embeds, 2, np.full((1, 1), 2, np.int32), steps.inputs_embeds)
    with pytest.raises(HearthError, match="asks ids for shape"):
        ops.upload_tree(trees, *(np.zeros((9, 8), np.int32),) * 2)
