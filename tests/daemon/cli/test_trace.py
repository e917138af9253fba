"""`hearth trace`: what is drawn, and what programs get."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console, RenderableType

from hearth.daemon.cli import trace as module
from hearth.daemon.cli.trace import listing, milliseconds, waterfall
from hearth.daemon.control.messages import Trace, TraceReport
from hearth.daemon.door.finished import FinishedRequest
from hearth_client.protocol import ImageUsage
from tests.daemon.observe.tracing.records import record


def drawn(view: RenderableType, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, legacy_windows=False).print(view)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_the_stages_follow_one_another_in_the_drawing() -> None:
    assert drawn(waterfall(record()), 72) == [
        "request      b09922ff-1",
        "client       kiosk",
        "reason       stop",
        "tokens       12 of prompt, 21 of reply",
        "first token  after 15.5 ms",
        "",
        "tokenize    ▉                                     1.00 ms  12 tokens",
        "queue       ▕███▍                                 4.00 ms",
        "prefill         ▐████████▏                        10.0 ms",
        "decode                   █████████████████▋       20.0 ms  1000 tokens/s",
        "detokenize               █                       0.500 ms  in pieces",
        "to the end                                ▐████   5.00 ms",
        "total                                             40.0 ms",
    ]


def test_rounds_and_the_parent_of_a_trace_are_named() -> None:
    ended = record(rounds=7, drafted=35, accepted_tokens=14, traceparent="00-1-2-01")
    text = "\n".join(drawn(waterfall(ended), 80))
    assert "rounds       7, 35 tokens drafted, 14 came of them, accept length 2.00" in text
    assert "traceparent  00-1-2-01" in text


def test_images_are_told_and_have_a_stage() -> None:
    images = ImageUsage(count=2, tokens=98, cached=1, decode_ms=1.5, resize_ms=0.5, engine_ms=12.0)
    text = drawn(waterfall(record(images=images, images_s=0.002)), 90)
    (told,) = (line for line in text if line.startswith("images  ") and "tokens" in line)
    assert "2, 98 tokens, 1 known before; decode + resize + engine 1.5 + 0.5 + 12 ms" in told
    stages = [line.split()[0] for line in text if line.endswith(" ms")]
    assert stages.index("images") < stages.index("queue")
    assert any("2.00 ms" in line for line in text)


def test_a_request_that_never_ran_shows_what_is_known() -> None:
    ended = record(
        reason="deadline_exceeded",
        failed=True,
        completion_tokens=0,
        ttft_s=None,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
        detokenize_s=0.0,
    )
    text = drawn(waterfall(ended), 60)
    names = [line.split("  ")[0] for line in text[text.index("") + 1 :]]
    assert names == ["tokenize", "to the end", "total"]
    assert not any(line.startswith("first token") for line in text)


@pytest.mark.parametrize("width", [8, 20, 40])
def test_a_narrow_terminal_cuts_and_breaks_nothing(width: int) -> None:
    for view in (waterfall(record()), listing([record()], 101.0, width)):
        assert all(len(line) <= width for line in drawn(view, width))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_list_has_a_line_for_each_request_and_cuts_no_id(width: int) -> None:
    failed = record(2, reason="executor_failed", failed=True, ttft_s=None, client="a\x1b[2J")
    lines = drawn(listing([record(), failed], 105.04, width), width)
    told = (
        "b09922ff-1  5 s ago  40.0 ms  15.5 ms  12 + 21" if width >= 80 else "b09922ff-1  5 s ago"
    )
    assert lines[1].startswith(told)
    assert "stop             kiosk" in lines[1]
    assert lines[2].endswith("executor_failed  a\ufffd[2J")
    assert len(lines) == 3


def test_a_long_name_of_a_client_is_cut() -> None:
    (line,) = drawn(listing([record(client="x" * 200)], 101.0, 80), 80)[1:]
    assert line.endswith("x…")


def test_no_requests_are_said_to_be_none() -> None:
    assert drawn(listing([], 0.0, 40), 40) == ["no request has ended yet"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.000 ms"), (0.00031, "0.310 ms"), (0.0256, "25.6 ms"), (1.5, "1500 ms")],
)
def test_times_have_the_digits_that_tell_something(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def asked(monkeypatch: pytest.MonkeyPatch, *found: FinishedRequest) -> list[Trace]:
    heard: list[Trace] = []

    def ask(request: Trace, _kind: object, _socket: object, **_options: Any) -> TraceReport:
        heard.append(request)
        return TraceReport(list(found), 101.0)

    monkeypatch.setattr(module, "ask", ask)
    return heard


def test_programs_get_the_record_or_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = asked(monkeypatch, record(7))
    one = json.loads(CliRunner().invoke(module.trace, ["b09922ff-7", "--json"]).output)
    many = json.loads(CliRunner().invoke(module.trace, ["--json"]).output)
    assert heard == [Trace("b09922ff-7"), Trace()]
    assert (one["request"], one["decode_s"]) == ("b09922ff-7", 0.02)
    assert many == [one]


def test_people_get_a_drawing_or_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, record(7))
    assert "decode" in CliRunner().invoke(module.trace, ["b09922ff-7"]).output
    assert "ended" in CliRunner().invoke(module.trace).output
