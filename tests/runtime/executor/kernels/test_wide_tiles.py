import pytest

from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.executor.kernels.product_tiles import wide_tiles
from tests.runtime.executor.kernels.model_shapes import GPUS, MODELS
from tests.runtime.executor.kernels.test_product_tiles import RESERVED, layer


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
