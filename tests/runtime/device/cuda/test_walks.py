from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder
from hearth.runtime.device.cpu.ops import CpuBatchSampler
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.device import AcceptedPath, SamplerBuffers, TreeBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.request import NO_ROW, RequestOptions, RowRequest, RowToken
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device.cuda.sampling_reference import Reference, random_params

pytestmark = pytest.mark.gpu


class Bench:
    """Samplers with trees on the device, and by NumPy on the host."""

    def __init__(
        self, gpu: CudaDevice, rows: Sequence[RowRequest], nodes: int, vocab: int, index: type
    ) -> None:
        self.gpu, self.nodes, self.vocab = gpu, nodes, vocab
        count = len(rows)
        self.host = SamplerBuffers(
            logits=Tensor("logits", np.zeros((count, nodes, vocab), np.float32)),
            lengths=Tensor("start", np.zeros(count, index)),
            next_tokens=Tensor("next", np.zeros(count, np.int32)),
            trees=TreeBuffers(
                Tensor("ids", np.zeros((count, nodes), np.int32)),
                Tensor("parents", np.zeros((count, nodes), np.int32)),
            ),
        )
        self.device, self.sampler = self._sampler(rows)
        self.cpu = CpuBatchSampler(self.host)
        self.cpu.reorder(BatchReorder.fresh(rows))
        self.references = [Reference(row, vocab) for row in rows]

    def _sampler(self, rows: Sequence[RowRequest]) -> tuple[SamplerBuffers, Any]:
        host, gpu = self.host, self.gpu
        assert host.trees is not None
        trees = TreeBuffers(*(gpu.constant(tensor.name, tensor.array) for tensor in host.trees))
        logits, start, tokens = (
            gpu.constant(tensor.name, tensor.array)
            for tensor in (host.logits, host.lengths, host.next_tokens)
        )
        device = SamplerBuffers(logits, start, tokens, trees)
        sampler = gpu.batch_sampler(device)
        sampler.reorder(BatchReorder.fresh(rows))
        return device, sampler

    def upload_tree(
        self,
        ids: NDArray[np.int32],
        parents: NDArray[np.int32],
        logits: NDArray[np.float32],
        starts: Sequence[int],
    ) -> None:
        rows, width = ids.shape
        self.host.logits.view((rows, width, self.vocab))[...] = logits
        self.host.lengths.array[:rows] = starts
        assert self.host.trees is not None
        self.host.trees.ids.view(ids.shape)[...] = ids
        self.host.trees.parents.view(ids.shape)[...] = parents
        self.gpu.ring.upload(self.device.logits.address, logits)
        self.gpu.ops.set_lengths(self.device.lengths, starts)
        assert self.device.trees is not None
        self.gpu.tree_ops.upload_tree(self.device.trees, ids, parents)


def random_round(
    rng: np.random.Generator, rows: int, width: int, vocab: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32], list[int]]:
    """Trees, likely tokens first, with logits that make long walks, and the rows' starts."""
    ids = np.minimum(rng.geometric(0.5, (rows, width)) - 1, vocab - 1).astype(np.int32)
    parents = np.full((rows, width), -2, np.int32)
    for row in parents:
        count = int(rng.integers(1, width + 1))
        row[0] = -1
        row[1:count] = [rng.integers(max(0, node - 6), node) for node in range(1, count)]
    logits = rng.standard_normal((rows, width, vocab)).astype(np.float32)
    logits[..., : min(4, vocab)] += np.float32(3)
    return ids, parents, logits, rng.integers(0, 1 << 20, rows).tolist()


def requests(params: Sequence[RequestOptions]) -> list[RowRequest]:
    return [
        RowRequest(
            token_ids=[0, 1, 1, 2],
            prompt_length=2,
            options=structs.replace(each, max_tokens=1 << 20),
        )
        for each in params
    ]


def assert_walk(
    bench: Bench, row: int, path: AcceptedPath, ids: NDArray[np.int32], parents: NDArray[np.int32]
) -> None:
    """Every token is the one of the row's reference, and every step leads to its first child."""
    logits = bench.host.logits.view((*ids.shape, bench.vocab))[row]
    node = 0
    for depth, (sample, visited) in enumerate(zip(path.samples, path.nodes, strict=True)):
        assert visited == node
        position = int(bench.host.lengths.array[row]) + depth + 1
        bench.references[row].check(logits[node], position, sample)
        children = np.flatnonzero((parents[row] == node) & (ids[row] == sample.token_id))
        node = int(children[0]) if children.size else -1
    assert node == -1
    assert bench.gpu.read(bench.device.next_tokens)[row] == path.samples[-1].token_id


@pytest.mark.parametrize(("width", "vocab"), [(1, 7), (5, 9), (33, 50), (60, 1000)])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_walks_follow_each_rows_own_settings(
    gpu: CudaDevice, width: int, vocab: int, index: type
) -> None:
    rng = np.random.default_rng(width)
    params = [random_params(rng, vocab) for _ in range(6)]
    bench = Bench(gpu, requests([*params, RequestOptions(), RequestOptions()]), 60, vocab, index)
    longest = 0
    for _ in range(24):
        ids, parents, logits, starts = random_round(rng, 8, width, vocab)
        bench.upload_tree(ids, parents, logits, starts)
        paths = bench.sampler.verify(8, width).result()
        for row, path in enumerate(paths):
            assert_walk(bench, row, path, ids, parents)
            longest = max(longest, len(path.samples))
    assert longest >= min(width, 3)


EXACT = [
    RequestOptions(),
    RequestOptions(logprobs=3),
    RequestOptions(repetition_penalty=1.7),
    RequestOptions(frequency_penalty=0.7, presence_penalty=-0.3, logprobs=0),
    RequestOptions(logit_bias=((2, 3.0),)),
    RequestOptions(temperature=1.0, seed=7),
    RequestOptions(temperature=0.9, top_k=4, seed=8, logprobs=2),
    RequestOptions(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=9),
]


GREEDY = [RequestOptions()] * 8


@pytest.mark.parametrize("width", [4, 33])
@pytest.mark.parametrize("params", [EXACT, GREEDY])
def test_walks_are_those_of_numpy(
    gpu: CudaDevice, width: int, params: list[RequestOptions]
) -> None:
    rng = np.random.default_rng(3)
    bench = Bench(gpu, requests(params), 40, 64, np.int64)
    for _ in range(10):
        ids, parents, logits, starts = random_round(rng, 8, width, 64)
        bench.upload_tree(ids, parents, logits, starts)
        found, wanted = bench.sampler.verify(8, width).result(), bench.cpu.verify(8, width).result()
        for path, expected in zip(found, wanted, strict=True):
            assert path is not None
            assert expected is not None
            assert path.nodes == expected.nodes
            assert [s.token_id for s in path.samples] == [s.token_id for s in expected.samples]
        for name in ("next_tokens", "lengths"):
            got, kept = (getattr(one, name) for one in (bench.device, bench.host))
            np.testing.assert_array_equal(gpu.read(got), kept.array)


def test_walks_give_what_single_steps_give(gpu: CudaDevice) -> None:
    rng = np.random.default_rng(4)
    bench = Bench(gpu, requests(EXACT), 40, 500, np.int64)
    for _ in range(4):
        ids, parents, logits, starts = random_round(rng, 8, 40, 500)
        bench.upload_tree(ids, parents, logits, starts)
        buffers, plain = bench._sampler(requests(EXACT))
        bench.sampler.reorder(BatchReorder.fresh(requests(EXACT)))
        paths = bench.sampler.verify(8, 40).result()
        for step in range(max(len(path.nodes) for path in paths)):
            nodes = [path.nodes[min(step, len(path.nodes) - 1)] for path in paths]
            gpu.ring.upload(buffers.logits.address, logits[np.arange(8), nodes])
            gpu.ops.set_lengths(buffers.lengths, [start + step + 1 for start in starts])
            samples = plain.sample(8).result()
            for path, sample in zip(paths, samples, strict=True):
                assert step >= len(path.samples) or path.samples[step] == sample


@pytest.mark.parametrize("width", [3, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [EXACT, GREEDY])
def test_only_a_visited_node_can_fail_its_row(
    gpu: CudaDevice, width: int, bad: float, params: list[RequestOptions]
) -> None:
    bench = Bench(gpu, requests(params), 40, 30, np.int64)
    ids = np.ones((8, width), np.int32)
    parents = np.full((8, width), -2, np.int32)
    parents[:, :3] = [-1, 0, 1]
    ids[:, 2] = 29
    logits = np.zeros((8, width, 30), np.float32)
    logits[:, :2, 1] = 80
    # Node 2 hangs on a token that is not picked.
    logits[:, 2, 5] = bad
    bench.upload_tree(ids, parents, logits, [9] * 8)
    assert [path.nodes for path in bench.sampler.verify(8, width).result()] == [[0, 1]] * 8
    logits[1::2, 1, 29] = bad
    bench.upload_tree(ids, parents, logits, [9] * 8)
    paths = bench.sampler.verify(8, width).result()
    assert [path.nodes for path in paths] == [[0, 1], [0]] * 4
    logits[::2, 0, 29] = bad
    bench.upload_tree(ids, parents, logits, [9] * 8)
    paths = bench.sampler.verify(8, width).result()
    assert [path is None for path in paths] == [True, False] * 4
    # Nothing was picked: the newest token is the one of before.
    assert gpu.read(bench.device.next_tokens).tolist() == [1] * 8


def test_walks_and_steps_share_histories(gpu: CudaDevice) -> None:
    params = RequestOptions(frequency_penalty=2.0)
    bench = Bench(gpu, requests([params]), 8, 6, np.int64)
    logits = np.tile(np.array([0, 0, 0, 3, 2.5, 0], np.float32), (1, 4, 1))
    chain = np.array([[0, 3, 4, 3]], np.int32)
    bench.upload_tree(chain, np.array([[-1, 0, 1, 2]], np.int32), logits, [4])
    (path,) = bench.sampler.verify(1, 4).result()
    assert [sample.token_id for sample in path.samples] == [3, 4, 3, 4]
    assert path.nodes == [0, 1, 2, 3]
    bench.gpu.ring.upload(bench.device.logits.address, logits[0, :1])
    assert bench.sampler.sample(1).result() == [RowToken(NO_ROW, 0)]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_large_vocabulary_is_walked_with_and_without_a_scan(gpu: CudaDevice, rows: int) -> None:
    rng = np.random.default_rng(rows)
    bench = Bench(gpu, requests(EXACT[:rows]), 60, 151936, np.int64)
    ids, parents, logits, starts = random_round(rng, rows, 60, 151936)
    bench.upload_tree(ids, parents, logits, starts)
    for row, path in enumerate(bench.sampler.verify(rows, 60).result()):
        assert_walk(bench, row, path, ids, parents)


def test_paths_are_read_once_and_in_time(gpu: CudaDevice) -> None:
    bench = Bench(gpu, requests([RequestOptions()]), 4, 20, np.int64)
    pending = [bench.sampler.verify(1, 1) for _ in range(5)]
    assert pending[4].result() is pending[4].result()
    with pytest.raises(HearthError, match="too late"):
        pending[0].result()
    assert bench.sampler.verify(0, 4).result() == []
    with pytest.raises(HearthError, match="no trees of 5 nodes"):
        bench.sampler.verify(1, 5)
    with pytest.raises(HearthError, match="trees of 2 rows"):
        bench.sampler.verify(2, 1)
    plain = gpu.batch_sampler(bench.device._replace(trees=None))
    with pytest.raises(HearthError, match="cannot verify"):
        plain.verify(0, 1)
