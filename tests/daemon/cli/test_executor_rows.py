import pytest

from hearth.daemon.cli.status import executor_rows
from hearth_client.protocol import (
    ExecutorReport,
    ImagesReport,
    PrefixReport,
    SpeculationReport,
    StageReport,
)

PREFILL = StageReport(steps=2, tokens=40, seconds=0.5)
NOTHING = StageReport(steps=0, tokens=0, seconds=0.0)


def test_each_stage_is_a_row_and_work_not_done_has_no_speed() -> None:
    assert executor_rows(ExecutorReport(prefill=PREFILL, generation=NOTHING)) == [
        ("prefill", "40 tokens in 2 steps, 0.5 s, 80 tokens/s"),
        ("generation", "0 tokens in 0 steps, 0.0 s"),
    ]


def test_speculation_has_its_length_positions_and_times() -> None:
    speculation = SpeculationReport(
        rounds=4,
        drafted=20,
        accepted=9,
        accept_length=2.25,
        steps=4,
        accepted_by_position=[4, 3, 2],
        draft_s=0.1,
        verify_s=0.2,
        commit_s=0.3,
    )
    report = ExecutorReport(prefill=PREFILL, generation=PREFILL, speculation=speculation)
    assert executor_rows(report)[2:] == [
        ("speculation", "9 tokens in 4 rounds, 20 drafted, accept length 2.25"),
        ("accepted by position", "100% 75% 50%"),
        ("speculation time", "draft 0.1 s, verify 0.2 s, commit 0.3 s"),
    ]


@pytest.mark.parametrize(("encoded", "told"), [(0, ""), (1, ", 1 encoded in 0.5 s")])
def test_images_tell_what_they_took(encoded: int, told: str) -> None:
    images = ImagesReport(
        images=2, tokens=98, merge_seconds=0.25, encoded=encoded, encode_seconds=0.5
    )
    report = ExecutorReport(prefill=PREFILL, generation=PREFILL, images=images)
    assert executor_rows(report)[2:] == [("images", f"2 as 98 tokens, merged in 0.2 s{told}")]


def test_a_prefix_cache_tells_what_it_saved_and_holds() -> None:
    held = {"device": 3 << 20, "disk": 0}
    cache = PrefixReport(rows=4, hits=3, queried=400, reused=300, bytes=held)
    report = ExecutorReport(prefill=PREFILL, generation=PREFILL, prefix=cache)
    assert executor_rows(report)[2:] == [
        ("prefix cache", "300 of 400 tokens reused (75%), device 3.0 MiB")
    ]
    fresh = PrefixReport(rows=0, hits=0, queried=0, reused=0)
    report = ExecutorReport(prefill=PREFILL, generation=PREFILL, prefix=fresh)
    assert executor_rows(report)[2:] == [("prefix cache", "0 of 0 tokens reused")]
