from functools import partial

import pytest

from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.executor.kernels.product_tiles import (
    COLUMNS,
    EIGHT_BYTES,
    GroupTiles,
    NarrowTiles,
    columns_for,
    group_tiles,
    most_blocks,
    narrow_tiles,
    norms_itself,
    takes_many,
    wide_tiles,
)
from tests.runtime.executor.kernels.model_shapes import GPUS, MODELS, ModelShape

RESERVED = 1024
"""Shared memory of a multiprocessor that each block takes beside its own."""


def layer(model: ModelShape) -> dict[str, tuple[int, int, bool, bool]]:
    """Eights of rows, inputs, whether rows are paired and whether inputs are normed."""
    hidden, queries, keys, inner, vocabulary = model
    return {
        "qkv": ((queries + 2 * keys) // 8, hidden, False, True),
        "output": (hidden // 8, queries, False, False),
        "gated": (2 * inner // 8, hidden, True, True),
        "down": (hidden // 8, inner, False, False),
        "head": (vocabulary // 8, hidden, False, True),
    }


def tiles_of(facts: GpuFacts, model: ModelShape, name: str, columns: int) -> NarrowTiles:
    eights, inputs, paired, normed = layer(model)[name]
    normed = normed and norms_itself(inputs, columns)
    return narrow_tiles(facts, eights, inputs, columns, paired=paired, normed=normed)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_narrow_product_has_all_rows_and_room(gpu: str, model: str, columns: int) -> None:
    facts = GPUS[gpu]
    for name, (eights, inputs, paired, _) in layer(MODELS[model]).items():
        tiles = tiles_of(facts, MODELS[model], name, columns)
        assert tiles.groups == -(-eights // tiles.eights)
        assert not (paired and tiles.eights % 2)
        assert 1 <= tiles.blocks <= tiles.groups
        assert tiles.shared_bytes <= facts.shared_per_block
        present = -(-tiles.blocks // facts.multiprocessors)
        assert present <= tiles.resident
        assert present * (tiles.shared_bytes + RESERVED) <= facts.shared_per_multiprocessor
        # A ring of one stage is one that nothing is asked for behind it.
        assert tiles.depth > 1 or (most_blocks(inputs) == 1 and tiles.groups == tiles.blocks)


def test_a_layer_of_a_small_model_is_one_block_a_multiprocessor_of_a_large_gpu() -> None:
    tiles = {
        name: tiles_of(GPUS["H200"], MODELS["0.6B"], name, 8) for name in layer(MODELS["0.6B"])
    }
    assert {name: (one.eights, one.blocks) for name, one in tiles.items()} == {
        "qkv": (4, 128),
        "output": (1, 128),
        "gated": (6, 128),
        "down": (1, 128),
        "head": (4, 132),
    }
    # The weights of a block are all on their way before it waits for its predecessor.
    assert [tiles[name].depth for name in ("qkv", "output", "gated", "down")] == [2, 4, 2, 6]


@pytest.mark.parametrize("name", ["qkv", "output", "gated", "down", "head"])
def test_a_block_leaves_room_for_another_on_a_small_gpu(name: str) -> None:
    for model in MODELS.values():
        tiles = tiles_of(GPUS["RTX 3090"], model, name, 8)
        assert tiles.shared_bytes <= 50_176


def test_several_tokens_take_all_of_a_large_gpu_in_the_shares_that_read_least() -> None:
    shares: dict[str, list[tuple[int, int, int]]] = {}
    for name in ("qkv", "output", "gated", "down"):
        for columns in COLUMNS[1:]:
            tiles = tiles_of(GPUS["H200"], MODELS["0.6B"], name, columns)
            blocks = tiles.blocks * (columns // tiles.columns)
            shares.setdefault(name, []).append((tiles.columns, tiles.eights, blocks))
            _, inputs, _, _ = layer(MODELS["0.6B"])[name]
            assert tiles.token_stages == min(4, most_blocks(inputs))
            # Where there is room for two blocks all weights are asked for before the wait.
            assert tiles.depth == (6 if (name, columns) == ("down", 16) else tiles.token_stages)
    assert shares == {
        "qkv": [(16, 4, 128), (32, 4, 128), (64, 4, 128)],
        "output": [(16, 1, 128), (16, 2, 128), (32, 2, 128)],
        "gated": [(16, 6, 128), (32, 6, 128), (64, 6, 128)],
        "down": [(16, 1, 128), (16, 2, 128), (32, 2, 128)],
    }


def test_a_wide_product_takes_what_would_read_its_tokens_again_and_again() -> None:
    taken = [
        (name, columns)
        for name in layer(MODELS["4B"])
        for columns in COLUMNS
        if takes_many(tiles_of(GPUS["H200"], MODELS["4B"], name, columns))
    ]
    assert taken == [("gated", 64), ("head", 64)]


def test_steps_take_the_narrowest_product() -> None:
    widths = {1: 8, 8: 8, 9: 16, 33: 64, 64: 64, 65: None, 512: None}
    assert {tokens: columns_for(tokens) for tokens in widths} == widths


def test_few_tokens_of_a_model_that_fits_registers_are_normed_in_the_product() -> None:
    served = {(inputs, tokens) for inputs in (72, 2560, 2568, 4096) for tokens in (1, 8, 9)}
    assert {one for one in served if norms_itself(*one)} == {(72, 1), (72, 8), (2560, 1), (2560, 8)}


def test_a_block_of_many_rows_and_inputs_that_is_alone_has_all_registers() -> None:
    h200 = GPUS["H200"]
    queries_of = partial(narrow_tiles, h200, columns=8, paired=False, normed=False)
    assert queries_of(768, 4096).resident == 1  # 8B
    # Of those that were measured, and of four bits, whose stages are smaller.
    assert queries_of(320, 4096).resident == queries_of(320, 9728).resident == 2
    assert queries_of(768, 4096, weight_bytes=EIGHT_BYTES // 4).resident == 2


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


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("tokens", [65, 512, 4096])
def test_the_warps_of_a_wide_product_share_its_sums(gpu: str, tokens: int) -> None:
    facts = GPUS[gpu]
    for model in MODELS.values():
        for eights, inputs, *_ in layer(model).values():
            tiles = wide_tiles(facts, eights, inputs, tokens)
            assert tiles.threads * tiles.tiles * tiles.share * 2 == 32 * tiles.area
            assert tiles.split <= facts.largest_cluster
            # A thread copies sixteen bytes of whole rows.
            assert tiles.eights * 64 % tiles.threads == tiles.widths * 64 % tiles.threads == 0
            assert tiles.depth >= 2
            assert tiles.resident * (tiles.shared_bytes + RESERVED) <= (
                facts.shared_per_multiprocessor
            )


def test_a_wide_product_keeps_the_multiprocessors_of_a_large_gpu_busy() -> None:
    hidden, queries, keys, inner, _ = MODELS["0.6B"]
    sizes = ((queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden))

    def chosen(facts: GpuFacts, tokens: int) -> list[tuple[int, int, int]]:
        tiles = [wide_tiles(facts, rows // 8, inputs, tokens) for rows, inputs in sizes]
        return [(one.eights, one.widths, one.split) for one in tiles]

    large = GPUS["H200"]
    assert chosen(large, 512) == [(8, 16, 1), (8, 8, 1), (8, 16, 1)]
    # A cluster shares the inputs where blocks are too few, if the GPU has room for clusters.
    assert chosen(large, 128) == [(8, 8, 1), (8, 8, 4), (8, 8, 1)]
    assert chosen(large._replace(largest_cluster=2), 128)[1] == (8, 8, 2)
    for facts in (GPUS["RTX 3090"], large._replace(largest_cluster=1)):
        assert all(split == 1 for *_, split in chosen(facts, 65))
