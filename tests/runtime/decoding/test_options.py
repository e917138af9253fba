import pytest
from msgspec import structs

from runtime.decoding.options import RuntimeOptions, effective_config
from runtime.errors import HearthError
from runtime.executor.simulated_engine import simulated_config

SIMULATED = simulated_config(max_batch=8, capacity=1000, prefill_chunk=128, step_ms=3)
STORED = structs.replace(SIMULATED, backend="onnxruntime", hidden_size=64, step_ms=0)


def test_without_options_the_folder_decides() -> None:
    assert effective_config(STORED, RuntimeOptions()) == STORED


def test_smaller_limits_are_honoured() -> None:
    config = effective_config(STORED, RuntimeOptions(max_batch=2, capacity=100))
    assert (config.max_supported_batch_size, config.max_kv_cache_capacity) == (2, 100)
    assert (config.max_supported_input_length, config.prefill_chunk) == (99, 100)


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        (RuntimeOptions(max_batch=9), "invalid_value", "max_batch"),
        (RuntimeOptions(capacity=1001), "invalid_value", "capacity"),
        (RuntimeOptions(capacity=1), "invalid_value", "capacity"),
        (RuntimeOptions(threads=-1), "invalid_value", "threads"),
        (RuntimeOptions(max_batch=-1), "invalid_value", "max_batch"),
        (RuntimeOptions(step_ms=2), "unsupported_option", "step_ms"),
    ],
)
def test_an_option_is_honoured_or_refused(options: RuntimeOptions, code: str, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        effective_config(STORED, options)
    assert (caught.value.code, caught.value.field) == (code, field)


def test_a_folder_can_be_simulated() -> None:
    config = effective_config(STORED, RuntimeOptions(engine_kind="simulated", step_ms=2))
    assert (config.backend, config.step_ms, config.hidden_size) == ("simulated", 2, 1)
    assert effective_config(SIMULATED, RuntimeOptions()).step_ms == 3


def test_a_simulated_folder_holds_no_model() -> None:
    with pytest.raises(HearthError) as caught:
        effective_config(SIMULATED, RuntimeOptions(engine_kind="onnxruntime"))
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "engine_kind")
