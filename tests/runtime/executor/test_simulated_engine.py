import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.device.device import HostStream
from hearth.runtime.executor.engine import Binding
from hearth.runtime.executor.simulated_engine import (
    HOT_LOGIT,
    SimulatedEngine,
    as_simulated,
    simulated_config,
    simulated_next_tokens,
)
from hearth.runtime.tensors.profiles import InferenceDims
from hearth.runtime.tensors.registry import build_registry_for_llm
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.executor.fake_engine import host_binding

STREAM = HostStream()
CONFIG = simulated_config(layers=1, vocab_size=50, eos_token_ids=(0, 7))


def _bindings(dims: InferenceDims) -> list[Binding]:
    return [
        host_binding(spec.name, spec.direction, np.zeros(spec.resolve(dims), spec.dtype))
        for spec in build_registry_for_llm(CONFIG).specs
    ]


def _next(token_id: int, position: int, ends: tuple[int, ...] = (0, 7)) -> int:
    return int(simulated_next_tokens(np.array([token_id]), np.array([position]), 50, ends)[0])


def test_the_next_token_is_the_documented_function() -> None:
    plain = [token for token in range(50) if token not in {0, 7}]
    for token_id, position in ((1, 0), (49, 3), (12, 2000)):
        assert _next(token_id, position) == plain[(31 * token_id + 17 * position + 7) % 48]


@given(
    st.integers(0, 49), st.integers(0, 10_000), st.lists(st.integers(0, 60), max_size=5).map(tuple)
)
def test_an_end_token_is_never_chosen(token: int, position: int, ends: tuple[int, ...]) -> None:
    chosen = _next(token, position, ends)
    assert 0 <= chosen < 50
    assert chosen not in ends


@pytest.mark.parametrize("captured", [False, True])
def test_logits_are_one_hot_at_the_next_token(*, captured: bool) -> None:
    bindings = _bindings(InferenceDims.prefill(2, 3, 256))
    arrays = {one.name: one.tensor.array for one in bindings}
    arrays["inputs_embeds"][:, :, 0] = [[5, 6, 8], [9, 10, 0]]
    arrays["attention_pos_id"][:] = [[4, 5, 6], [0, 1, 0]]
    arrays["last_token_ids"][:, 0] = [2, 1]
    engine = SimulatedEngine(CONFIG, build_registry_for_llm(CONFIG))
    arrays["logits"].fill(3)
    if captured:
        engine.capture(bindings, STREAM).launch(STREAM)
    else:
        engine.run(bindings, STREAM)
    for row, (token_id, position) in enumerate(((8, 6), (10, 1))):
        expected = np.zeros(50, np.float32)
        expected[_next(token_id, position)] = HOT_LOGIT
        assert np.array_equal(arrays["logits"][row, 0], expected)


def test_a_step_takes_its_time() -> None:
    config = simulated_config(layers=1, step_ms=20)
    engine = SimulatedEngine(config, build_registry_for_llm(config))
    started = time.monotonic()
    engine.run(_bindings(InferenceDims.decode(1, 256)), STREAM)
    assert time.monotonic() - started >= 0.02


@pytest.mark.parametrize(
    ("dims", "seconds"),
    [
        (InferenceDims.prefill(2, 3, 256), 0.031),
        (InferenceDims.prefill(1, 1, 256), 0.006),
        (InferenceDims.decode(2, 256), 0.001),
    ],
)
def test_a_prefill_step_takes_longer_by_its_tokens_with_the_padding(
    dims: InferenceDims, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = simulated_config(layers=1, step_ms=1, prefill_us=5000)
    engine = SimulatedEngine(config, build_registry_for_llm(config))
    engine.use_profile(int(dims == InferenceDims.decode(2, 256)), STREAM)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    engine.run(_bindings(dims), STREAM)
    assert slept == [pytest.approx(seconds)]


def test_it_has_all_bindings_of_a_decoder_and_needs_no_scratch() -> None:
    registry = build_registry_for_llm(CONFIG)
    engine = SimulatedEngine(CONFIG, registry)
    assert [one.name for one in engine.io_tensors] == [spec.name for spec in registry.specs]
    assert engine.required_context_memory == 0
    engine.set_context_memory(Tensor.zeros("none", (0,), np.dtype(np.float32)))
    engine.use_profile(0, STREAM)
    engine.close()


def test_a_folder_keeps_its_limits_and_vocabulary_when_it_is_simulated() -> None:
    folder = simulated_config(
        vocab_size=99, layers=3, max_batch=5, capacity=700, eos_token_ids=(4, 5), prefill_chunk=64
    )
    config = as_simulated(folder, 2.5, 40)
    assert config.backend == "simulated"
    assert (config.vocab_size, config.eos_token_ids) == (99, (4, 5))
    assert (config.max_supported_batch_size, config.max_kv_cache_capacity) == (5, 700)
    assert (config.prefill_chunk, config.step_ms, config.num_attention_layers) == (64, 2.5, 3)
    assert (config.hidden_size, config.prefill_us) == (1, 40)
