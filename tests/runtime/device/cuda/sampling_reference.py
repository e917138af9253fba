"""One row's tokens by the NumPy forms, with room for rounding at the borders of a filter."""

import math
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.request import RequestOptions, RowRequest, RowToken
from hearth.runtime.sampling.batch import log_normaliser
from hearth.runtime.sampling.ranking import leading
from hearth.runtime.sampling.row_sampler import ScoreAdjustment, UniformSource, draw, tempered

NEAR = 1e-6


class Reference:
    def __init__(self, row: RowRequest, vocab: int) -> None:
        self.params = row.options
        generated = row.token_ids[row.prompt_length :]
        self._adjustment = ScoreAdjustment(row.options, row.token_ids, generated, vocab)
        self._uniforms = UniformSource(row.options.seed or 0)

    def check(self, logits: NDArray[np.float32], position: int, sample: RowToken | None) -> None:
        scores = self._adjustment.apply(logits)
        best = int(scores.argmax())
        if not np.isfinite(scores[best]):
            assert sample is None
            return
        assert sample is not None
        token = sample.token_id
        if self.params.temperature == 0:
            assert token == best
        else:
            relative = tempered(scores, float(scores[best]), self.params.temperature)
            uniform = self._uniforms.at(position)
            if token != draw(relative, self.params, uniform):
                assert token in _near(relative, self.params, uniform), (self.params, uniform)
        self._adjustment.accept(token)
        self._check_logprobs(logits, sample)

    def _check_logprobs(self, logits: NDArray[np.float32], sample: RowToken) -> None:
        if self.params.logprobs is None:
            assert sample.logprob is None
            return
        normaliser = log_normaliser(logits, logits.max())
        assert sample.logprob is not None
        expected = float(logits[sample.token_id]) - normaliser
        assert math.isclose(sample.logprob, expected, abs_tol=1e-5, rel_tol=1e-6)
        count = self.params.logprobs
        ids = leading(logits, count).tolist() if count else []
        assert [top.token_id for top in sample.top] == ids
        for top in sample.top:
            wanted = float(logits[top.token_id]) - normaliser
            assert math.isclose(top.logprob, wanted, abs_tol=1e-5, rel_tol=1e-6)


def _near(relative: NDArray[np.float32], params: RequestOptions, uniform: float) -> set[int]:
    """Every token that rounding of the uniform number, top-p or min-p could pick."""
    steps = (-NEAR, 0.0, NEAR)
    tokens = set()
    for u, p, m in product(steps, steps, steps):
        moved = RequestOptions(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=min(max(params.top_p + p, 1e-9), 1.0) if params.top_p < 1 else 1.0,
            min_p=params.min_p * (1 + m),
        )
        tokens.add(draw(relative, moved, min(max(uniform + u, 0.0), 1 - 1e-12)))
    return tokens


def random_params(rng: np.random.Generator, vocab: int) -> RequestOptions:
    """Every setting on in some rows, in all combinations."""

    def sometimes(value: float, off: float) -> float:
        return value if rng.random() < 0.5 else off

    biased = {int(i) for i in rng.integers(0, vocab, rng.integers(0, 5))}
    bias = tuple((token_id, float(rng.uniform(-20, 20))) for token_id in biased)
    return RequestOptions(
        temperature=float(sometimes(float(rng.choice([1e-30, 0.3, 0.8, 1.0, 5.0, 100.0])), 0.8)),
        top_k=int(sometimes(int(rng.integers(1, max(2, 2 * vocab))), int(rng.choice([0, 3, 40])))),
        top_p=float(sometimes(float(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999])), 1.0)),
        min_p=float(sometimes(float(rng.choice([0.001, 0.05, 0.5, 1.0])), 0.0)),
        repetition_penalty=float(sometimes(float(rng.uniform(0.5, 2)), 1.0)),
        presence_penalty=float(sometimes(float(rng.uniform(-2, 2)), 0.0)),
        frequency_penalty=float(sometimes(float(rng.uniform(-2, 2)), 0.0)),
        logit_bias=bias if rng.random() < 0.5 else (),
        seed=int(rng.integers(0, 1 << 63)),
        logprobs=int(rng.integers(0, min(20, vocab) + 1)) if rng.random() < 0.3 else None,
    )
