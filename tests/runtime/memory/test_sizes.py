from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cuda.programs import WantedKernels
from hearth.runtime.executor.kernels.engine import io_tensors_of, step_shapes
from hearth.runtime.executor.kernels.step import DecoderStep
from hearth.runtime.memory.sizes import ScratchPart, lay_out, predicted_scratch, step_parts
from tests.runtime.engine_configs import small_config
from tests.runtime.executor.kernels.kernel_engines import (
    FACTS,
    kernels_config,
    layout_of,
    registry_of,
)

PHASES = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)


@given(st.lists(st.tuples(st.integers(0, 5000), PHASES), max_size=8))
def test_parts_that_live_together_share_nothing(sizes: list[tuple[int, list[int]]]) -> None:
    parts = [ScratchPart(str(i), size, *phases) for i, (size, phases) in enumerate(sizes)]
    offsets, nbytes = lay_out(parts)
    for one, other in combinations(parts, 2):
        apart = one.last < other.first or other.last < one.first
        first, second = offsets[one.name], offsets[other.name]
        empty = not one.nbytes or not other.nbytes
        behind = first + one.nbytes <= second or second + other.nbytes <= first
        assert apart or empty or behind
    assert all(offsets[one.name] % 256 == 0 for one in parts)
    assert all(offsets[one.name] + one.nbytes <= nbytes for one in parts)


def test_what_a_layer_is_done_with_makes_room_for_the_next() -> None:
    config = small_config()
    parts = step_parts(config, 64, normed=1000, partials=2000)
    layout = lay_out(parts)
    # Activations lie where queries, keys and values were.
    assert layout.offsets["activations"] == layout.offsets["projected"]
    assert layout.nbytes < sum(part.nbytes for part in parts)


@pytest.mark.parametrize("multiprocessors", [8, 46, 132, 188])
@pytest.mark.parametrize(("capacity", "heads"), [(256, 2), (2048, 16), (8192, 4)])
def test_what_is_predicted_is_enough_on_every_gpu(
    multiprocessors: int, capacity: int, heads: int
) -> None:
    config = kernels_config(
        head_dim=128, num_attention_heads=heads, max_kv_cache_capacity=capacity, prefill_chunk=128
    )
    needed = needed_scratch(config, multiprocessors)
    assert needed <= predicted_scratch(config, 4, 128, capacity) < 40 * needed


@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize("chunk", [64, 256, 512])
@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (32, 4)])
def test_what_is_predicted_is_enough_for_nodes_of_many_heads(
    heads: tuple[int, int], chunk: int, batch: int
) -> None:
    config = kernels_config(
        head_dim=128,
        num_attention_heads=heads[0],
        num_kv_heads=heads[1],
        max_supported_batch_size=batch,
        max_kv_cache_capacity=2048,
        prefill_chunk=chunk,
    )
    needed = needed_scratch(config, 132)
    assert needed <= predicted_scratch(config, batch, chunk, 2048)


def needed_scratch(config: LLMEngineRunnerConfig, multiprocessors: int) -> int:
    """What the steps of an engine take on a GPU of so many multiprocessors."""
    layout = layout_of(config)
    io_tensors = io_tensors_of(config, registry_of(config, layout))
    facts = FACTS._replace(multiprocessors=multiprocessors)
    step = DecoderStep(config, layout, io_tensors, WantedKernels(), facts)
    return step.provide(step_shapes(config, facts)).scratch


@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_parts_have_the_sizes_of_a_step(tokens: int) -> None:
    sizes = {
        one.name: one.nbytes for one in step_parts(small_config(), tokens, normed=7, partials=9)
    }
    assert sizes == {
        "stream": tokens * 16 * 4,
        "normed": 7,
        "projected": tokens * (2 + 2) * 8 * 4,
        "partials": 9,
        "attended": tokens * 2 * 8 * 4,
        "shrunk": 0,
        "mailbox": 0,
        "activations": tokens * 32 * 4,
    }
