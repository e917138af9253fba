import re

import pytest

import hearth_client
from hearth.runtime.errors import CODES
from hearth_client.errors import (
    _BY_CODE,
    HearthClientError,
    InvalidValue,
    RequestRefused,
    ServerError,
    error_for,
)
from hearth_client.protocol import Error
from tests.clients.vectors import CLIENTS


def documented_codes() -> set[str]:
    text = (CLIENTS / "PROTOCOL.md").read_text(encoding="utf-8")
    table = text.split("## Error codes")[1].split("## Versions")[0]
    return set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))


def test_a_code_becomes_its_exception() -> None:
    error = error_for(Error(code="invalid_value", message="top_p is wrong", field="top_p"))
    assert isinstance(error, InvalidValue)
    assert isinstance(error, RequestRefused)
    assert (error.code, error.field) == ("invalid_value", "top_p")
    assert str(error) == "top_p is wrong (invalid_value, top_p)"
    assert error.retry_after_s is None


def test_a_failure_says_when_to_come_again() -> None:
    error = error_for(Error(code="queue_full", message="256 wait already", retry_after_s=1.2345))
    assert error.retry_after_s == 1.2345
    assert str(error) == "256 wait already (queue_full, again in 1.23 s)"


def test_an_unknown_code_is_kept_in_a_server_error() -> None:
    error = error_for(Error(code="brand_new", message="something"))
    assert type(error) is ServerError
    assert str(error) == "something (brand_new)"


@pytest.mark.parametrize("code", sorted(documented_codes()))
def test_every_documented_code_has_its_exception(code: str) -> None:
    assert code in CODES
    assert code in _BY_CODE or code == ServerError.code, "add a class to hearth_client.errors"


def test_every_exception_is_documented_and_exported() -> None:
    assert set(_BY_CODE) <= documented_codes()
    for kind in _BY_CODE.values():
        assert issubclass(kind, HearthClientError)
        assert vars(hearth_client)[kind.__name__] is kind
