from collections.abc import Iterator

import numpy as np
import pytest

from hearth.runtime.config import DType
from hearth.runtime.executor.kernels import product_tiles
from hearth.runtime.executor.kernels.product_tiles import SHAPES, GroupTiles
from hearth.runtime.executor.kernels.products import Weight
from tests.runtime.executor.kernels.lab import TYPES, Lab
from tests.runtime.executor.kernels.test_product_sums import EPS, Array, Case

pytestmark = pytest.mark.gpu
MOST = 300
SOME = (0, 7, 255, MOST - 1)
SIZES = [(64, (64, 8)), (192, (128, 64, 40)), (1024, (640,)), (2560, (320, 72))]
"""Inputs and rows of matrices one below the other, of which each but the last has whole groups."""


@pytest.fixture(params=SHAPES, ids=lambda shape: "-".join(map(str, shape.tiles)))
def tiles(
    request: pytest.FixtureRequest, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GroupTiles]:
    """The only tiles that products of many tokens have."""
    if lab.facts.capability != (9, 0):
        pytest.skip("the instructions of four warps together are those of 9.0 alone")
    monkeypatch.setattr(product_tiles, "SHAPES", (request.param,))
    product_tiles.group_tiles.cache_clear()
    yield request.param.tiles
    product_tiles.group_tiles.cache_clear()


def case_of(lab: Lab, dtype: DType, inputs: int, rows: tuple[int, ...]) -> Case:
    case = Case(lab, dtype, inputs, rows)
    random = np.random.default_rng(3)
    case.x = random.standard_normal((MOST, inputs)).astype(np.float32)
    case.scratch = lab.poison((MOST, inputs), case.dtype)
    case.products.use_scratch(case.scratch.address)
    return case


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("inputs", "rows"), SIZES)
def test_tokens_have_the_bits_that_they_have_alone(
    lab: Lab, tiles: GroupTiles, dtype: DType, inputs: int, rows: tuple[int, ...]
) -> None:
    case = case_of(lab, dtype, inputs, rows)
    alone = {place: case.normed(case.x[place : place + 1])[0] for place in SOME}
    for tokens in (257, MOST):
        chosen = product_tiles.group_tiles(lab.facts, rows, inputs, tokens, gated=False)
        assert chosen == (None if inputs // 64 % tiles.shares else tiles)
        found = case.normed(case.x[:tokens])
        assert np.isfinite(found).all()
        for place in SOME:
            assert place >= tokens or np.array_equal(found[place], alone[place]), (tokens, place)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("inputs", "rows"), [(128, 72), (128, 64), (1024, 320), (2560, 1024)])
def test_what_is_passed_on_has_the_bits_that_it_has_alone(
    lab: Lab, tiles: GroupTiles, dtype: DType, inputs: int, rows: int
) -> None:
    case = case_of(lab, dtype, inputs, (rows, rows))
    gate, up = (weight._replace(bias=0) for weight in case.weights)
    random = np.random.default_rng(4)
    values = (random.standard_normal((inputs, rows)) * rows**-0.5).astype(case.dtype)
    held = lab.put(values)
    down = Weight(held.address, inputs, gate.form)
    passed = case.products.stages(gate, up, down, inputs, MOST)
    assert passed == (rows % 64 == 0 and rows // 64 % tiles.shares == 0)

    def layer(x: Array, *, staged: bool) -> Array:
        """x and what comes of it by gate, up and down."""
        given, out = lab.put(x), lab.poison((len(x), rows), case.dtype)
        norm = (given.address, case.gain_address, EPS)
        case.run(
            (
                *case.products.gated(*norm, gate, up, inputs, len(x), out.address, staged=staged),
                *case.products.residual(
                    out.address, down, rows, len(x), given.address, staged=staged
                ),
            )
        )
        return lab.read(given)

    found = layer(case.x, staged=passed)
    assert np.isfinite(found).all()
    for place in SOME:
        alone = layer(case.x[place : place + 1], staged=False)[0]
        assert np.array_equal(found[place], alone), (tiles, place)
