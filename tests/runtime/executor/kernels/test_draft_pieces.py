from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.config import DType
from hearth.runtime.executor.kernels.draft_step import PART, DraftPieces, parts_bytes
from tests.runtime.executor.kernels.lab import EPSILON, TYPES, Lab

pytestmark = pytest.mark.gpu
EPS = 1e-6
HIDDEN = (8, 96, 1024, 2568)


def normed(x: NDArray[Any], gain: NDArray[Any]) -> NDArray[Any]:
    x = x.astype(np.float64)
    return np.asarray(x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * gain.astype(float))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("given", [True, False])
def test_embeddings_and_hidden_states_are_normed_side_by_side(
    lab: Lab, hidden: int, dtype: DType, *, given: bool
) -> None:
    rng, kind = np.random.default_rng(hidden), TYPES[dtype]
    tokens = 13
    x = rng.standard_normal((tokens, hidden)).astype(np.float32) * 3
    own, embeds = (rng.standard_normal((tokens, hidden)).astype(kind) for _ in range(2))
    own[4:] = 0
    gains = [rng.uniform(0.5, 1.5, hidden).astype(kind) for _ in range(2)]
    on_gpu = [lab.put(one) for one in (x, own, embeds, *gains)]
    out = lab.poison((tokens, 2 * hidden), kind)
    at = [one.address for one in on_gpu]
    pieces = DraftPieces(lab.programs, dtype)
    gains_at = (at[3], at[4])
    lab.run(
        pieces.fuse(at[0], at[1], at[2], gains_at, EPS, out.address, hidden, tokens, given=given)
    )
    both = x * given + own.astype(np.float32)
    np.testing.assert_array_equal(lab.read(on_gpu[0]), both)
    wanted = np.concatenate([normed(embeds, gains[0]), normed(both, gains[1])], -1)
    found = lab.read(out)
    np.testing.assert_allclose(
        found.astype(np.float64), wanted, rtol=1.01 * EPSILON[dtype] + 1e-5, atol=1e-6
    )
    # A token alone is the same token.
    alone = lab.poison((1, 2 * hidden), kind)
    size = hidden * kind.itemsize
    behind = 7 * size
    own_x, rest = lab.put(x[7:8]).address, (at[1] + behind, at[2] + behind)
    lab.run(
        pieces.fuse(own_x, rest[0], rest[1], gains_at, EPS, alone.address, hidden, 1, given=given)
    )
    assert lab.read(alone).tobytes() == found[7:8].tobytes()


@pytest.mark.parametrize("dtype", TYPES)
def test_selected_tokens_lie_one_behind_the_other(lab: Lab, dtype: DType) -> None:
    rng, kind = np.random.default_rng(0), TYPES[dtype]
    rows, seq_len, kept, hidden, queries = 3, 9, 4, 72, 160
    x = rng.standard_normal((rows, seq_len, hidden)).astype(np.float32)
    context = rng.standard_normal((rows, seq_len, queries)).astype(kind)
    last = np.array([[5, 6, 7, 8], [0, 2, 1, 3], [8, 8, 0, 4]])
    out = lab.poison((rows, kept, hidden), np.float32), lab.poison((rows, kept, queries), kind)
    places = lab.poison((rows, kept), np.int64)
    lab.run(
        DraftPieces(lab.programs, dtype).select(
            (lab.put(x).address, out[0].address, hidden),
            (lab.put(context).address, out[1].address, queries),
            lab.put(last).address,
            places.address,
            (rows, seq_len, kept),
        )
    )
    np.testing.assert_array_equal(lab.read(out[0]), np.take_along_axis(x, last[:, :, None], 1))
    np.testing.assert_array_equal(
        lab.read(out[1]), np.take_along_axis(context, last[:, :, None], 1)
    )
    assert not lab.read(places).any()


@pytest.mark.parametrize("vocabulary", [1, 96, 4095, PART, PART + 1, 32000, 151936])
@pytest.mark.parametrize("rows", [1, 3, 80])
def test_log_probabilities_are_those_of_numpy(lab: Lab, rows: int, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32) * 8
    logits[0, : vocabulary // 2] = -np.inf
    logits[-1] += 300
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    wanted = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    on_gpu = lab.put(logits)
    parts = lab.poison((parts_bytes(rows, vocabulary) // 4,), np.float32)
    pieces = DraftPieces(lab.programs, "float16")
    lab.run(pieces.log_softmax(on_gpu.address, parts.address, rows, vocabulary))
    found = lab.read(on_gpu)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=6e-5)
    again = lab.put(logits[rows // 2 : rows // 2 + 1])
    lab.run(pieces.log_softmax(again.address, parts.address, 1, vocabulary))
    assert lab.read(again).tobytes() == found[rows // 2 : rows // 2 + 1].tobytes()
