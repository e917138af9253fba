import pytest

from hearth.runtime.executor.kernels.product_tiles import GroupTiles, group_tiles
from tests.runtime.executor.kernels.model_shapes import GPUS, MODELS
from tests.runtime.executor.kernels.test_product_tiles import RESERVED

LARGE = GPUS["H200"]


def chosen(model: str, tokens: int) -> dict[str, GroupTiles | None]:
    hidden, queries, keys, inner, _ = MODELS[model]
    sizes = {
        "qkv": ((queries, keys, keys), hidden),
        "o": ((hidden,), queries),
        "gated": ((inner, inner), hidden),
        "down": ((hidden,), inner),
    }
    return {
        name: group_tiles(LARGE, rows, inputs, tokens, gated=name == "gated")
        for name, (rows, inputs) in sizes.items()
    }


@pytest.mark.parametrize("model", ["0.6B", "4B"])
@pytest.mark.parametrize("tokens", [300, 512, 4096])
def test_blocks_fit_on_a_multiprocessor(model: str, tokens: int) -> None:
    for tiles in chosen(model, tokens).values():
        assert tiles is not None
        assert tiles.resident * (tiles.shared_bytes + RESERVED) <= LARGE.shared_per_multiprocessor
        assert tiles.resident * tiles.threads <= 2048
        # A stage is always one share's.
        assert tiles.depth % tiles.shares == 0


def test_a_prompt_of_512_tokens_keeps_all_multiprocessors_busy() -> None:
    found = {name: tiles and tiles[:2] for name, tiles in chosen("0.6B", 512).items()}
    assert found == {"qkv": (8, 16), "o": (8, 8), "gated": (24, 16), "down": (8, 8)}


@pytest.mark.parametrize(
    ("gpu", "rows", "inputs", "tokens"),
    [
        ("RTX 3090", (1024,), 1024, 512),
        ("H200", (1024,), 1024, 64),
        ("H200", (1024,), 1000, 512),
        ("H200", (1000, 24), 1024, 512),
    ],
)
def test_other_products_have_none(
    gpu: str, rows: tuple[int, ...], inputs: int, tokens: int
) -> None:
    assert group_tiles(GPUS[gpu], rows, inputs, tokens, gated=False) is None
    # Rows of gate and up take turns, whatever their number.
    assert group_tiles(LARGE, (1000, 1000), 1024, 512, gated=True) is not None


def test_a_later_gpu_has_other_instructions() -> None:
    later = LARGE._replace(capability=(10, 0))
    assert group_tiles(later, (1024,), 1024, 512, gated=False) is None
