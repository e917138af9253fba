from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.system.overload_rows import BatchFill, LongAndShort, Priority, Row, TokenLimit

FILL = BatchFill(mean_rows=7.5, lone_wait_ms=5.5, wait_limit_ms=5.0)
LIMIT = TokenLimit(
    long_sent=20,
    long_refused=20,
    refusal_ms=1.2,
    encoding_ms=0.8,
    queued_tokens=64500,
    tokens_limit=65536,
    short_sent=2,
    short_accepted=2,
)
PRIORITY = Priority(high_wait_ms=11.0, batch_ms=160.0, low_sent=48, low_served=48)
MIXED = LongAndShort(short_served=900, short_wait_ms=195.0, wait_limit_ms=2000.0, long_tokens=1900)


@pytest.mark.parametrize("row", [FILL, LIMIT, PRIORITY, MIXED])
def test_what_is_as_it_has_to_be_has_no_faults(row: Row) -> None:
    assert row.faults == []


@pytest.mark.parametrize(
    "row",
    [
        replace(FILL, mean_rows=6.0),
        replace(FILL, lone_wait_ms=56.0),
        replace(LIMIT, long_refused=19),
        replace(LIMIT, refusal_ms=11.0),
        replace(LIMIT, queued_tokens=65537),
        replace(LIMIT, short_accepted=1),
        replace(PRIORITY, high_wait_ms=211.0),
        replace(PRIORITY, low_served=47),
        replace(MIXED, short_wait_ms=2051.0),
        replace(MIXED, long_tokens=1899),
    ],
)
def test_what_is_not_is_named_once(row: Row) -> None:
    assert len(row.faults) == 1
