from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from hearth.bench.arrivals.clients import Seen, Watched
from hearth.bench.arrivals.ideal import Ask
from tests.bench.running import run
from tests.system.overload import (
    BatchFill,
    LongAndShort,
    OverloadFigures,
    Priority,
    Row,
    TokenLimit,
    overload,
    tokens_per_s,
)

GOOD = OverloadFigures(
    seconds=60.0,
    offered=140.0,
    tokens_per_s=550.0,
    capacity=45.0,
    capacity_tokens_per_s=551.0,
    throughput_share=0.998,
    requests=8400,
    served=2700,
    refused=5700,
    refused_by_code={"queue_full": 5700},
    hinted=5700,
    refusal_p50_ms=0.8,
    refusal_p99_ms=7.0,
    came_again=100,
    taken_again=98,
    queue_most=64,
    queue_limit=64,
    failed=0,
    lost_answers=0,
    wrong_tokens=0,
    late_p99_ms=5.0,
)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, []),
        ({"lost_answers": 1}, ["answers were lost"]),
        ({"wrong_tokens": 1}, ["tokens were wrong"]),
        ({"failed": 1}, ["requests failed"]),
        ({"queue_most": 65}, ["the queue was above its limit"]),
        ({"refusal_p99_ms": 10.1}, ["refusals were slow"]),
        ({"throughput_share": 0.94}, ["accepted work was slowed down"]),
        (
            {"throughput_share": 0.94, "late_p99_ms": 5.1},
            ["the clients were late themselves: measure again on a quiet machine"],
        ),
    ],
)
def test_what_is_not_as_it_has_to_be_is_named(change: dict[str, float], fault: list[str]) -> None:
    assert replace(GOOD, **change).faults == fault


def test_the_tenth_in_which_the_house_fills_does_not_count() -> None:
    ended = [1000.0 + tenth / 10 for tenth in range(1, 120)]
    watched = Watched(1000.0, [Seen(ask=Ask(0.0, 1, 119), due=0.0, ended=ended)], [])
    assert tokens_per_s(watched, 10.0) == pytest.approx(10.0)


def test_nothing_is_lost_where_three_times_as_much_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    _, figures = run("overload", "--seconds", "1.5", "--step-ms", "5", command=overload)
    found = figures["overload"]
    assert found["refused"] == found["hinted"] > 0
    assert found["requests"] == found["served"] + found["refused"]
    assert found["queue_most"] <= found["queue_limit"]
    assert [found[name] for name in ("failed", "lost_answers", "wrong_tokens")] == [0, 0, 0]


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
