import pytest
from msgspec import structs

from hearth.runtime.batch import tokens_to_generate
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation.batch_runtime import check_row
from hearth.runtime.request import RequestOptions, RowRequest

CONFIG = structs.replace(
    simulated_config(vocab_size=100, capacity=64), max_supported_input_length=40
)


def _row(
    tokens: int = 3, prompt: int | None = None, max_tokens: int = 5, token_id: int = 1
) -> RowRequest:
    length = tokens if prompt is None else prompt
    return RowRequest(
        token_ids=[token_id] * tokens,
        prompt_length=length,
        options=RequestOptions(max_tokens=max_tokens),
    )


@pytest.mark.parametrize(
    "row",
    [
        _row(),
        _row(tokens=40),
        _row(tokens=40, max_tokens=24),
        _row(tokens=1, max_tokens=63),
        _row(tokens=63, prompt=40, max_tokens=24),
        _row(token_id=99),
    ],
)
def test_rows_at_the_limit_are_served(row: RowRequest) -> None:
    check_row(CONFIG, row, 64)


@pytest.mark.parametrize(
    ("row", "code", "field"),
    [
        (_row(tokens=0), "prompt_empty", "token_ids"),
        (_row(prompt=0), "prompt_empty", "token_ids"),
        (_row(prompt=4), "invalid_value", "prompt_length"),
        (_row(tokens=41), "prompt_too_long", "token_ids"),
        (_row(token_id=100), "invalid_value", "token_ids"),
        (_row(token_id=-1), "invalid_value", "token_ids"),
        (_row(max_tokens=0), "invalid_value", "max_tokens"),
        (_row(tokens=8, prompt=3, max_tokens=5), "invalid_value", "max_tokens"),
        (_row(tokens=40, max_tokens=25), "capacity_exceeded", "max_tokens"),
        (_row(tokens=60, prompt=40, max_tokens=25), "capacity_exceeded", "max_tokens"),
    ],
)
def test_a_row_beyond_a_limit_is_refused_by_field(row: RowRequest, code: str, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        check_row(CONFIG, row, 64)
    assert (caught.value.code, caught.value.field) == (code, field)


def test_without_a_limit_a_row_takes_what_fits() -> None:
    unlimited = RowRequest(token_ids=[1] * 40, prompt_length=40)
    check_row(CONFIG, unlimited, 64)
    assert tokens_to_generate(unlimited, 64) == 24
    with pytest.raises(HearthError) as caught:
        check_row(CONFIG, unlimited, 40)
    assert (caught.value.code, caught.value.field) == ("capacity_exceeded", "token_ids")
