"""Draws on a GPU: distributions of every shape, borders of blocks, and many rows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder
from hearth.runtime.device.cuda import walks, wide_draws
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.sampler import CudaBatchSampler
from hearth.runtime.device.device import PendingSamples, SamplerBuffers
from hearth.runtime.errors import HearthError
from hearth.runtime.request import NO_ROW, RequestOptions, RowRequest, RowToken
from tests.runtime.arrangements import arrangements, keep, new_row
from tests.runtime.device.cuda import test_walks
from tests.runtime.device.cuda.sampling_reference import Reference, random_params

pytestmark = pytest.mark.gpu

VOCABULARIES = [1, 31, 1000, 151936]


class Bench:
    """A sampler on the device and the reference of every row."""

    def __init__(
        self, gpu: CudaDevice, vocab: int, rows: Sequence[RowRequest], index: type = np.int64
    ) -> None:
        self.gpu, self.vocab = gpu, vocab
        count = len(rows)
        self.buffers = SamplerBuffers(
            logits=gpu.zeros("logits", (count, 1, vocab), np.dtype(np.float32)),
            lengths=gpu.zeros("start", (count,), np.dtype(index)),
            next_tokens=gpu.zeros("next", (count,), np.dtype(np.int32)),
        )
        self.sampler: CudaBatchSampler = gpu.batch_sampler(self.buffers)
        self.sampler.reorder(BatchReorder.fresh(rows))
        self.rows = [Reference(row, vocab) for row in rows]

    def step(
        self,
        logits: NDArray[np.float32],
        positions: Sequence[int],
        first: int = 0,
        picked: int | None = None,
    ) -> list[RowToken | None]:
        self.gpu.ring.upload(self.buffers.logits.address, logits)
        self.gpu.ops.set_lengths(self.buffers.lengths, [0] * first + list(positions))
        return self.sampler.sample(len(logits), first, picked).result()

    def check(
        self,
        logits: NDArray[np.float32],
        positions: Sequence[int],
        first: int = 0,
        picked: int | None = None,
    ) -> None:
        wanted = self.gpu.read(self.buffers.next_tokens)
        samples = self.step(logits, positions, first, picked)
        end = len(samples) if picked is None else picked
        assert samples[end:] == [RowToken(NO_ROW, -1)] * (len(samples) - end)
        for i, sample in enumerate(samples[:end]):
            self.rows[first + i].check(logits[i], positions[i], sample)
            wanted[first + i] = -1 if sample is None else sample.token_id
        assert self.gpu.read(self.buffers.next_tokens).tolist() == wanted.tolist()

    def reorder(self, reorder: BatchReorder) -> None:
        newest = self.gpu.read(self.buffers.next_tokens)
        self.sampler.reorder(reorder)
        self.rows = reorder.settle(self.rows, lambda row: Reference(row.request, self.vocab))
        for source, target, _ in reorder.moves:
            newest[target] = newest[source]
        assert self.gpu.read(self.buffers.next_tokens).tolist() == newest.tolist()


def request(params: RequestOptions, token_ids: Sequence[int] = (), prompt: int = 0) -> RowRequest:
    return RowRequest(
        token_ids=list(token_ids),
        prompt_length=prompt,
        options=structs.replace(params, max_tokens=1 << 20),
    )


def random_rows(rng: np.random.Generator, vocab: int, count: int) -> list[RowRequest]:
    rows = []
    for _ in range(count):
        length = int(rng.integers(0, 60))
        ids = rng.integers(0, vocab, length).tolist()
        rows.append(request(random_params(rng, vocab), ids, int(rng.integers(0, length + 1))))
    return rows


def random_logits(rng: np.random.Generator, count: int, vocab: int) -> NDArray[np.float32]:
    spread = rng.choice([0.01, 1.0, 4.0, 20.0], (count, 1))
    logits: NDArray[np.float32] = rng.standard_normal((count, vocab)).astype(np.float32)
    logits *= spread.astype(np.float32)
    # Some rows are full of equal scores.
    tied = rng.random(count) < 0.3
    logits[tied] = np.round(logits[tied])
    return logits


@pytest.mark.parametrize(("vocab", "rounds"), [(1, 5), (31, 100), (1000, 60), (151936, 8)])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_random_rows_agree_with_numpy(
    gpu: CudaDevice, vocab: int, rounds: int, index: type
) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(rounds):
        bench = Bench(gpu, vocab, random_rows(rng, vocab, 8), index)
        for _ in range(3):
            bench.check(random_logits(rng, 8, vocab), rng.integers(0, 1 << 20, 8).tolist())


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_lowest_id_wins_among_equals(gpu: CudaDevice, vocab: int) -> None:
    bench = Bench(gpu, vocab, [request(RequestOptions())] * 3)
    logits = np.zeros((3, vocab), np.float32)
    logits[0] = -0.0
    logits[1, vocab // 2 :] = 1
    logits[2, : vocab // 3] = -1
    samples = bench.step(logits, [1, 2, 3])
    assert [s.token_id for s in samples if s] == [0, vocab // 2, vocab // 3]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_flat_rows_take_every_refinement(gpu: CudaDevice, vocab: int) -> None:
    params = [
        RequestOptions(temperature=1, top_k=max(1, vocab // 3), seed=4),
        RequestOptions(temperature=100, top_p=0.37, seed=5),
        RequestOptions(temperature=0.5, top_k=max(1, vocab - 1), top_p=0.9, min_p=0.5, seed=6),
    ]
    bench = Bench(gpu, vocab, [request(p) for p in params])
    for position in range(10):
        bench.check(np.full((3, vocab), 2.5, np.float32), [position] * 3)


@pytest.mark.parametrize("vocab", [31, 1000, 151936])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(
    gpu: CudaDevice, vocab: int, bad: float, temperature: float
) -> None:
    bench = Bench(gpu, vocab, [request(RequestOptions(temperature=temperature, logprobs=2))] * 3)
    logits = random_logits(np.random.default_rng(1), 3, vocab)
    logits[1, vocab - 2] = bad
    samples = bench.step(logits, [1, 2, 3])
    assert [sample is None for sample in samples] == [False, True, False]
    assert gpu.read(bench.buffers.next_tokens)[1] == -1
    bench.check(random_logits(np.random.default_rng(2), 3, vocab), [2, 3, 4])


def test_rows_with_prompt_left_are_only_checked(gpu: CudaDevice) -> None:
    bench = Bench(gpu, 1000, [request(RequestOptions(temperature=t)) for t in (1, 0, 0, 1)])
    before = gpu.read(bench.buffers.next_tokens)
    logits = random_logits(np.random.default_rng(3), 4, 1000)
    logits[2, 7] = np.nan
    samples = bench.step(logits, [4] * 4, picked=2)
    assert samples[2:] == [None, RowToken(NO_ROW, -1)]
    assert (gpu.read(bench.buffers.next_tokens)[2:] == before[2:]).all()
    for row in (0, 1):
        bench.rows[row].check(logits[row], 4, samples[row])


def test_scores_that_leave_float32_fail(gpu: CudaDevice) -> None:
    params = RequestOptions(repetition_penalty=0.01)
    bench = Bench(gpu, 31, [request(params, [3]), request(params, [4])])
    logits = np.zeros((2, 31), np.float32)
    logits[:, 3] = 3e38
    samples = bench.step(logits, [1, 1])
    assert samples[0] is None
    assert samples[1] == RowToken(NO_ROW, 3)


@pytest.mark.parametrize("vocab", [31, 1000])
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_histories_follow_their_rows_wherever_they_are_placed(
    gpu: CudaDevice, vocab: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    bench = Bench(gpu, vocab, random_rows(rng, vocab, 8))
    for _ in range(5):
        reorder = data.draw(arrangements([0] * len(bench.rows), 8))
        requests = random_rows(rng, vocab, 8)
        assignments = [new_row(place, requests[place]) for place, *_ in reorder.assignments]
        bench.reorder(reorder._replace(assignments=assignments))
        rows = len(bench.rows)
        decoding = data.draw(st.integers(0, rows))
        picked = data.draw(st.integers(0, rows - decoding))
        positions = rng.integers(0, 999, rows).tolist()
        bench.check(random_logits(rng, decoding, vocab), positions[:decoding])
        joiners = random_logits(rng, rows - decoding, vocab)
        bench.check(joiners, positions[decoding:], decoding, picked)
    bench.reorder(BatchReorder(0))
    assert bench.sampler.sample(0).result() == []


def test_long_histories_and_biases_come_in_pieces(gpu: CudaDevice) -> None:
    rng = np.random.default_rng(7)
    vocab = 50000
    ids = rng.integers(0, 100, 40000).tolist()
    bias = tuple((i, float(rng.uniform(-5, 5))) for i in range(0, vocab, 2))
    params = RequestOptions(frequency_penalty=0.01, repetition_penalty=1.2, logit_bias=bias)
    # An id outside of the vocabulary has no logit.
    bench = Bench(gpu, vocab, [request(params, [*ids, vocab, -1, 1 << 40], 20000)])
    bench.check(random_logits(rng, 1, vocab), [5])


def test_steps_are_read_while_the_next_one_runs(gpu: CudaDevice) -> None:
    bench = Bench(gpu, 1000, [request(RequestOptions(temperature=1, seed=9))])
    logits = random_logits(np.random.default_rng(8), 1, 1000)
    first = bench.step(logits, [1])
    pending = []
    for position in (1, 2):
        gpu.ops.set_lengths(bench.buffers.lengths, [position])
        pending.append(bench.sampler.sample(1))
    assert pending[0].result() == first
    bench.rows[0].check(logits[0], 2, pending[1].result()[0])
    pending += [bench.sampler.sample(1) for _ in range(5)]
    with pytest.raises(HearthError, match="too late"):
        pending[2].result()


def test_captured_samples_are_those_of_other_steps_and_count_the_slots_of_their_rows(
    gpu: CudaDevice,
) -> None:
    rng, vocab = np.random.default_rng(5), 3000
    rows = [
        request(RequestOptions(temperature=0)),
        request(RequestOptions(temperature=0.9, top_p=0.9, seed=3, logprobs=2)),
        request(RequestOptions(temperature=0, repetition_penalty=1.5), [4, 9], 1),
        request(RequestOptions(temperature=0, frequency_penalty=1.5), [4, 9], 1),
    ]
    usual, bench = Bench(gpu, vocab, rows), Bench(gpu, vocab, rows)
    sampler = bench.sampler.captured_sampler
    sampler.expect(0)
    captured = gpu.record(lambda: sampler.queue(4))
    assert not gpu.read(bench.buffers.lengths).any()
    starts = [7, 0, 30, 2]
    gpu.ops.set_lengths(bench.buffers.lengths, starts)
    before: PendingSamples | None = None
    wanted: list[RowToken | None] = []
    for live in (4, 4, 2, 2, 3, 1, 4, 4, 3):
        logits = random_logits(rng, 4, vocab)
        gpu.ring.upload(bench.buffers.logits.address, logits)
        sampler.expect(live)
        captured.launch(gpu.stream)
        pending = sampler.samples()
        starts[:live] = [one + 1 for one in starts[:live]]
        assert gpu.read(bench.buffers.lengths).tolist() == starts
        if before is not None:
            # Those of one step are read while the next is there already.
            assert before.result() == wanted
        before, wanted = pending, usual.step(logits[:live], starts[:live])
        tokens = [gpu.read(one.buffers.next_tokens)[:live].tolist() for one in (bench, usual)]
        assert tokens[0] == tokens[1]
    # A step that is not captured takes no turn.
    gpu.ring.upload(bench.buffers.logits.address, logits)
    gpu.ops.set_lengths(bench.buffers.lengths, starts)
    assert bench.sampler.sample(3).result() == usual.step(logits[:3], starts[:3])
    assert before is not None
    assert before.result() == wanted
    captured.close()


def test_settings_are_checked(gpu: CudaDevice) -> None:
    bench = Bench(gpu, 31, [request(RequestOptions())])
    bad: list[Any] = [RequestOptions(top_p=0.0), RequestOptions(logit_bias=((31, 1.0),))]
    for params in bad:
        with pytest.raises(HearthError, match=r"must be|names token"):
            bench.sampler.reorder(BatchReorder.fresh([request(params)]))
    with pytest.raises(HearthError, match="exceed"):
        bench.sampler.reorder(BatchReorder.fresh([request(RequestOptions())] * 2))
    with pytest.raises(HearthError, match="cannot move"):
        bench.sampler.reorder(keep(1))
    for wrong in ((2, 0, None), (1, 1, None), (1, 0, 2)):
        with pytest.raises(HearthError, match="cannot sample"):
            bench.sampler.sample(*wrong)


TILE = wide_draws.THREADS // 32 * wide_draws.UNIT
Logits = NDArray[np.float32]


def peaked(rng: np.random.Generator, vocab: int) -> Logits:
    """A few hundred likely tokens far above all others."""
    logits: Logits = rng.standard_normal(vocab).astype(np.float32) * np.float32(2)
    likely = rng.integers(0, vocab, 300)
    logits[likely] += (10 + rng.exponential(3, 300)).astype(np.float32)
    return logits


def narrow(rng: np.random.Generator, vocab: int) -> Logits:
    """Thousands of tokens in a bin of the score."""
    return (rng.standard_normal(vocab) * 1e-3).astype(np.float32)


def alone(rng: np.random.Generator, vocab: int) -> Logits:
    """All other tokens are too unlikely to be drawn, and beyond the last bin."""
    logits: Logits = rng.standard_normal(vocab).astype(np.float32) - np.float32(20000)
    logits[rng.integers(0, vocab)] = 0
    return logits


SHAPES: dict[str, Callable[[np.random.Generator, int], Logits]] = {
    "normal": lambda rng, vocab: rng.standard_normal(vocab).astype(np.float32) * np.float32(3),
    "wide": lambda rng, vocab: rng.standard_normal(vocab).astype(np.float32) * np.float32(30),
    "peaked": peaked,
    "narrow": narrow,
    "equal": lambda _, vocab: np.zeros(vocab, np.float32),
    "rounded": lambda rng, vocab: np.round(rng.standard_normal(vocab) * 2).astype(np.float32),
    "alone": alone,
    "rising": lambda _, vocab: np.arange(vocab, dtype=np.float32) / np.float32(vocab / 40),
}


@pytest.mark.parametrize("vocab", [1, TILE - 1, TILE + 1, 3 * TILE + 517, 151936])
@pytest.mark.parametrize("shape", SHAPES)
def test_filters_agree_with_numpy(gpu: CudaDevice, shape: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = [
        request(RequestOptions(temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p, seed=top_k))
        for top_k in (0, 1, 50, 1024)
        for top_p, min_p in ((1.0, 0.0), (0.9, 0.0), (0.3, 0.05))
    ]
    rows += [request(RequestOptions(logprobs=min(20, vocab))), request(RequestOptions(logprobs=0))]
    bench = Bench(gpu, vocab, rows)
    for position in (3, 1 << 20):
        logits = np.stack([SHAPES[shape](rng, vocab) for _ in rows])
        bench.check(logits, [position] * len(rows))


@pytest.mark.parametrize("top_k", [1, 3, 700])
def test_equal_scores_on_both_sides_of_a_blocks_border_rank_by_id(
    gpu: CudaDevice, top_k: int
) -> None:
    vocab = 3 * TILE
    params = RequestOptions(temperature=1.0, top_k=top_k, seed=3)
    bench = Bench(gpu, vocab, [request(params)] * 2)
    logits = np.zeros((2, vocab), np.float32)
    best = np.arange(TILE - 2, TILE + 3)
    # Three of five equal ones; or one or all of them, and the others from the first id on.
    logits[:, best] = 5
    others = np.setdiff1d(np.arange(vocab), best)[: max(0, top_k - best.size)]
    kept = {*best[:top_k].tolist(), *others.tolist()}
    drawn = set()
    for position in range(60):
        samples = bench.step(logits, [position, 99 + position])
        drawn |= {sample.token_id for sample in samples if sample}
    assert drawn <= kept
    assert len(drawn) > min(top_k, 5) // 2


@pytest.mark.parametrize("blocks", [1, 3, 29])
def test_tokens_do_not_depend_on_the_number_of_blocks(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    vocab = 20011
    rng = np.random.default_rng(blocks)
    rows = random_rows(rng, vocab, 12)
    logits = random_logits(rng, 12, vocab)
    positions = rng.integers(0, 1 << 20, 12).tolist()
    wanted = Bench(gpu, vocab, rows).step(logits, positions)
    monkeypatch.setattr(wide_draws.WideDraws, "blocks", lambda *_: blocks)
    assert Bench(gpu, vocab, rows).step(logits, positions) == wanted


@pytest.mark.parametrize("count", [1, 63, 64, 65, 256])
def test_any_number_of_rows_is_served(gpu: CudaDevice, count: int) -> None:
    vocab = 2 * TILE + 3
    rng = np.random.default_rng(count)
    bench = Bench(gpu, vocab, random_rows(rng, vocab, count))
    for _ in range(2):
        bench.check(random_logits(rng, count, vocab), rng.integers(0, 1 << 20, count).tolist())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_leave_the_others_alone(gpu: CudaDevice, bad: float) -> None:
    vocab = TILE + 9
    params = [
        RequestOptions(),
        RequestOptions(temperature=0.8, seed=1),
        RequestOptions(temperature=0.8, top_k=9, top_p=0.8, seed=2, logprobs=3),
        RequestOptions(temperature=0.8, top_p=0.8, min_p=0.1, seed=3),
    ]
    bench, other = (Bench(gpu, vocab, [request(each) for each in params]) for _ in range(2))
    for position in range(8):
        logits = random_logits(np.random.default_rng(position), 4, vocab)
        wanted = other.step(logits, [position] * 4)
        wanted[position % 4] = None
        logits[position % 4, vocab - 1 - 250 * position] = bad
        assert bench.step(logits, [position] * 4) == wanted


@pytest.mark.parametrize("shape", ["equal", "rounded"])
def test_a_vocabulary_may_have_more_tokens_than_a_block_can_count(
    gpu: CudaDevice, shape: str
) -> None:
    vocab = (1 << 18) + 40001
    params = [
        RequestOptions(temperature=1, top_p=0.9, seed=1),
        RequestOptions(temperature=1, top_k=vocab - 9, top_p=0.999, seed=2),
        RequestOptions(logprobs=3),
    ]
    bench = Bench(gpu, vocab, [request(each) for each in params])
    logits = np.stack([SHAPES[shape](np.random.default_rng(1), vocab)] * 3)
    bench.check(logits, [8, 9, 10])


def test_far_unlikelier_tokens_are_reported(gpu: CudaDevice) -> None:
    vocab = TILE + 100
    logits = np.full((1, vocab), -1e30, np.float32)
    logits[0, [7, TILE + 3]] = 1, 2
    bench = Bench(gpu, vocab, [request(RequestOptions(logprobs=5))])
    (sample,) = bench.step(logits, [0])
    assert isinstance(sample, RowToken)
    assert [top.token_id for top in sample.top] == [TILE + 3, 7, 0, 1, 2]


@pytest.mark.parametrize("width", [4, 33])
def test_walks_are_the_same_by_one_block_a_row(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    rng = np.random.default_rng(width)
    params = [*test_walks.EXACT[:5], *(random_params(rng, 500) for _ in range(3))]
    rows = test_walks.requests(params)
    wide, narrow_ones = (test_walks.Bench(gpu, rows, 40, 500, np.int64) for _ in range(2))
    for _ in range(4):
        planted = test_walks.random_round(rng, 8, width, 500)
        wide.upload_tree(*planted)
        wanted = wide.sampler.verify(8, width).result()
        narrow_ones.upload_tree(*planted)
        with monkeypatch.context() as patch:
            patch.setattr(walks, "_MOST_LOGITS", 0)
            assert narrow_ones.sampler.verify(8, width).result() == wanted
