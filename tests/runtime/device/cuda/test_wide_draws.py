"""Draws over the whole card: distributions of every shape, borders of blocks, and many rows."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.device.cuda import walks, wide_draws
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.request import RequestOptions
from hearth.runtime.sampling import Sample
from tests.runtime.device.cuda import test_walks
from tests.runtime.device.cuda.sampling_reference import random_params
from tests.runtime.device.cuda.test_sampler import Bench, random_logits, random_rows, request

pytestmark = pytest.mark.gpu
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
    assert isinstance(sample, Sample)
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
