import pytest
from msgspec import structs

from hearth.bench.arrivals.clients import Seen, Watched
from hearth.bench.arrivals.figures import (
    ArrivalFigures,
    Load,
    arrival_figures,
    calls_of,
    checked,
    full_house_rate,
    since,
)
from hearth.bench.arrivals.ideal import Ask, Calls, Served
from hearth.bench.load_clients import Tally
from hearth_client.protocol import ExecutorReport, StageReport


def seen(due: float, ended: list[float], reason: str = "length") -> Seen:
    """A stream whose tokens came 1 ms behind their steps."""
    ask = Ask(due, 10, len(ended))
    first = ended[0] + 0.001 if ended else 0.0
    return Seen(ask=ask, due=due, first=first, tokens=[7] * len(ended), ended=ended, reason=reason)


def report(prefill: tuple[int, int, float], decode: tuple[int, int, float]) -> ExecutorReport:
    stages = (
        StageReport(steps=steps, tokens=tokens, seconds=seconds)
        for steps, tokens, seconds in (prefill, decode)
    )
    return ExecutorReport(prefill=next(stages), generation=next(stages))


# Prefill to 100.02, a step to 100.03, the other's prefill to 100.04, then two steps of both.
TWO = [
    seen(100.0, [100.02, 100.03, 100.05, 100.06]),
    seen(100.025, [100.04, 100.05, 100.06]),
]
IDEAL = [Served(Ask(0.0, 10, 4), [0.01, 0.02]), Served(Ask(0.5, 10, 4), [0.53])]


def figures(streams: list[Seen] = TWO, late: float = 0.0) -> ArrivalFigures:
    calls = Calls(0.010, 0.010, 0.0, 0.012)
    watched = Watched(100.0, streams, [late])
    return arrival_figures(Load(3.5, 0.055, calls, watched, IDEAL), checked(streams, list_of))


def list_of(one: Seen) -> list[int]:
    return one.tokens


def test_the_figures_of_two_replies() -> None:
    found = figures()
    assert (found.requests, found.tokens, found.clean, found.offered) == (2, 7, True, 3.5)
    assert found.ttft_p50_ms == pytest.approx((21 + 16) / 2)
    assert found.ttft_p99_ms == pytest.approx(16 + 0.99 * 5)
    assert found.ideal_p50_ms == pytest.approx(20)
    # Gaps of 10, 20, 10, 10 and 10 ms.
    assert found.gap_p99_ms == pytest.approx(10 + 0.96 * 10)
    assert found.tokens_per_s == pytest.approx(5 / 0.055)
    assert found.ideal_tokens_per_s == pytest.approx(2 / 0.055)
    assert found.gap_longest_ms == pytest.approx(20)
    assert (found.whole_longest_ms, found.ideal_whole_longest_ms) == pytest.approx((60, 30))
    assert found.tail_ratios["whole_longest"] == pytest.approx(2)
    # Within the 55 ms: a step of one row and one of two.
    assert found.places_used == pytest.approx(1.5)
    assert (found.decode_ms, found.prefill_ms) == (10, 12)


@pytest.mark.parametrize(
    ("ttft_ms", "late_s", "credible"),
    [(20, 0.0049, True), (20, 0.0051, False), (200, 0.019, True), (200, 0.021, False)],
)
def test_clients_that_were_late_spoil_the_figures(
    ttft_ms: float, late_s: float, *, credible: bool
) -> None:
    found = structs.replace(figures(late=late_s), ttft_p99_ms=ttft_ms)
    assert found.late_p99_ms == pytest.approx(1000 * late_s)
    assert found.credible is credible


def test_a_request_that_failed_is_told_and_has_no_times() -> None:
    streams = [*TWO, seen(100.0, [], reason="")]
    found = figures(streams)
    assert (found.requests, found.failed, found.clean) == (3, 1, False)
    assert found.ttft_p50_ms == pytest.approx((21 + 16) / 2)


def test_nothing_is_divided_by_nothing() -> None:
    found = figures([seen(100.0, [], reason="")])
    assert (found.ttft_p99_ms, found.gap_p99_ms, found.places_used) == (0, 0, 0)


def test_streams_are_held_against_the_truth() -> None:
    assert checked(TWO, list_of) == Tally(requests=2, tokens=7)
    short = structs.replace(TWO[0], tokens=[7, 7, 7])
    stopped = structs.replace(TWO[0], reason="stop")
    assert checked([short], lambda _: [7] * 4) == Tally(requests=1, tokens=3, lost=1, misended=1)
    assert checked([stopped], list_of).misended == 1
    assert checked([seen(0.0, [], reason="")], lambda _: [7]) == Tally(requests=1, lost=1, failed=1)


def test_calls_take_what_the_executor_says_and_what_lies_between_two() -> None:
    # Calls of 9 ms of which each ends 10 ms behind the one before; a prefill costs 3 ms more.
    found = calls_of(report((2, 20, 0.024), (3, 5, 0.027)), TWO)
    assert found.decode_s == pytest.approx(0.010)
    assert found.prefill_mean_s == pytest.approx(0.013)
    assert found.prefill(10) == pytest.approx(0.013)
    assert found.prefill(0) == pytest.approx(0.010)


def test_a_prefill_that_is_hidden_between_two_steps_is_no_step() -> None:
    hidden = [seen(0.0, [0.01, 0.02, 0.03, 0.04, 0.06, 0.07])]
    assert calls_of(report((1, 10, 0.01), (5, 5, 0.05)), hidden).decode_s == pytest.approx(0.01)


def test_a_prefill_faster_than_a_step_costs_what_it_took() -> None:
    found = calls_of(report((2, 20, 0.010), (3, 5, 0.030)), [])
    assert found == pytest.approx(Calls(0.010, 0.005, 0.0, 0.005))


def test_a_report_counts_from_the_one_before() -> None:
    now = report((5, 50, 0.5), (9, 30, 0.9))
    before = report((2, 30, 0.2), (4, 10, 0.5))
    did = since(before, now)
    assert (did.prefill.steps, did.prefill.tokens, did.generation.tokens) == (3, 20, 20)
    assert did.generation.seconds == pytest.approx(0.4)
    assert since(None, now) == now


def test_a_full_house_is_counted_while_all_decode() -> None:
    rows = [seen(0.0, [1.0, 2.0, 3.0, 4.0]), seen(0.0, [2.0, 3.0, 4.0, 5.0])]
    assert full_house_rate(Watched(0.0, rows, [])) == pytest.approx(4 / 2)
    apart = [rows[0], seen(0.0, [5.0, 6.0])]
    assert full_house_rate(Watched(0.0, apart, [])) is None
    assert full_house_rate(Watched(0.0, [rows[0], seen(0.0, [], "")], [])) is None
