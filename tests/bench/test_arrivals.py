import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.bench import toy_daemon
from hearth.bench.arrivals.clients import CONNECTIONS, Seen, Watched, closed_loop, open_loop
from hearth.bench.arrivals.figures import (
    ArrivalFigures,
    Load,
    arrival_figures,
    calls_of,
    checked,
    full_house_rate,
    since,
)
from hearth.bench.arrivals.ideal import Ask, Calls, Served, first_come, in_turn
from hearth.bench.load_clients import Tally
from hearth_client import HearthClientError
from hearth_client.protocol import Delta, Done, ExecutorReport, StageReport, Usage

SOCKET = Path("socket")


class FakeStream:
    """Two deltas of three tokens, once the daemon has had enough requests."""

    def __init__(self, daemon: "FakeDaemon", count: int) -> None:
        self.done: Done | None = None
        self._daemon = daemon
        self._count = count

    async def __aiter__(self) -> AsyncIterator[Delta]:
        await asyncio.sleep(0.005)
        await self._daemon.enough.wait()
        yield Delta(id="1", seq=0, text="a", tokens=[5], ended=1.0)
        yield Delta(id="1", seq=1, text="bc", tokens=[6, 7], ended=2.0)
        usage = Usage(prompt_tokens=5, completion_tokens=self._count)
        self.done = Done(id="1", reason="length", usage=usage)


class FakeDaemon:
    """It answers when it has `needed` requests, and tells who asked what; prompt "x" is refused."""

    def __init__(self, needed: int) -> None:
        self.enough = asyncio.Event()
        self._needed = needed
        self.asked: list[tuple[object, dict[str, Any]]] = []

    def ask(self, client: object, options: dict[str, Any]) -> None:
        self.asked.append((client, options))
        if len(self.asked) >= self._needed:
            self.enough.set()

    @asynccontextmanager
    async def connect(self, _: Path) -> AsyncIterator["FakeClient"]:
        yield FakeClient(self)


class FakeClient:
    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    async def generate(self, prompt: str, **options: Any) -> FakeStream:
        self._daemon.ask(self, options)
        if prompt == "x":
            raise HearthClientError("refused")
        return FakeStream(self._daemon, options["max_tokens"])


Serve = Callable[[int], FakeDaemon]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    def made(needed: int) -> FakeDaemon:
        daemon = FakeDaemon(needed)
        monkeypatch.setattr(toy_daemon, "AsyncClient", daemon.connect)
        return daemon

    return made


async def test_a_request_goes_at_its_time_whether_earlier_ones_have_ended_or_not(
    serve: Serve,
) -> None:
    # The first is answered when the last was asked.
    daemon = serve(CONNECTIONS + 1)
    asks = [Ask(0.01 * number, 5, 3, "p") for number in range(CONNECTIONS + 1)]
    watched = await open_loop(SOCKET, asks)
    assert [one.ask for one in watched.seen] == asks
    for one, late in zip(watched.seen, watched.late, strict=True):
        assert one.due == pytest.approx(watched.began + one.ask.at)
        assert late >= 0
        assert one.first > one.due
        assert (one.tokens, one.ended, one.reason) == ([5, 6, 7], [1.0, 2.0, 2.0], "length")
    clients = [client for client, _ in daemon.asked]
    assert len(set(clients)) == CONNECTIONS
    assert clients[0] is clients[-1]
    asked = {"max_tokens": 3, "ignore_eos": True, "timestamps": True, "adapter": ""}
    assert daemon.asked[0][1] == asked


async def test_each_request_is_of_one_of_so_many_clients_by_chance(serve: Serve) -> None:
    senders = []
    for _ in range(2):
        daemon = serve(1)
        await open_loop(SOCKET, [Ask(0.0, 5, 3, "p")] * 40, clients=3)
        numbers: dict[object, int] = {}
        senders.append([numbers.setdefault(one, len(numbers)) for one, _ in daemon.asked])
    assert senders[0] == senders[1]
    assert set(senders[0]) == {0, 1, 2}
    assert senders[0] != [number % 3 for number in range(40)]


async def test_clients_of_a_closed_loop_go_on_with_the_next_request(serve: Serve) -> None:
    daemon = serve(1)
    asks = [Ask(0.0, 5, number, "p") for number in (1, 2, 3)]
    watched = await closed_loop(SOCKET, asks, clients=2, seconds=0.5)
    assert len({client for client, _ in daemon.asked}) == 2
    tokens = [options["max_tokens"] for _, options in daemon.asked]
    assert tokens[:7] == [1, 2, 3, 1, 2, 3, 1]
    assert len(watched.seen) == len(daemon.asked)
    assert watched.late


async def test_a_refused_request_has_no_reason_for_its_end(serve: Serve) -> None:
    serve(1)
    watched = await open_loop(SOCKET, [Ask(0.0, 5, 3, "x"), Ask(0.0, 5, 3, "p")])
    assert [(one.reason, one.tokens) for one in watched.seen] == [
        ("", []),
        ("length", [5, 6, 7]),
    ]


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


CALLS = Calls(decode_s=1.0, prefill_s=2.0)
ASKS = st.lists(
    # Quarters of a second, so that sums are exact.
    st.builds(Ask, st.integers(0, 200).map(lambda n: n / 4), st.just(1), st.integers(1, 12)),
    max_size=30,
).map(lambda asks: sorted(asks, key=lambda ask: ask.at))


def times(*asks: Ask, calls: Calls = CALLS, places: int = 8) -> list[list[float]]:
    return [row.times for row in first_come(asks, calls, places)]


def test_a_request_alone_has_its_prefill_and_then_a_token_each_step() -> None:
    (row,) = first_come([Ask(5.0, 10, 3)], CALLS, 8)
    assert row.times == [7.0, 8.0, 9.0]
    assert row.ttft == 2.0


def test_who_comes_in_a_step_waits_for_its_end_and_those_who_run_for_one_prefill() -> None:
    # 0 to 2 prefill, 2 to 3 decode; the second comes at 2.5: 3 to 5 its prefill, then both decode.
    assert times(Ask(0.0, 10, 4), Ask(2.5, 10, 2)) == [[2.0, 3.0, 6.0, 7.0], [5.0, 6.0]]


def test_those_who_wait_together_share_a_prefill_that_costs_by_all_their_tokens() -> None:
    calls = Calls(decode_s=1.0, prefill_s=1.0, prefill_token_s=0.1)
    assert times(Ask(0.0, 10, 2), Ask(0.0, 20, 1), calls=calls) == [[4.0, 5.0], [4.0]]


def test_prefills_take_turns_with_the_steps_of_those_who_run() -> None:
    # The second comes in the first one's prefill: a step of the first one goes before its own.
    assert times(Ask(0.0, 1, 3), Ask(1.0, 1, 1)) == [[2.0, 3.0, 6.0], [5.0]]


def test_nobody_waits_for_a_step_that_has_no_rows() -> None:
    assert times(Ask(0.0, 1, 1), Ask(1.0, 1, 1)) == [[2.0], [4.0]]


def test_a_place_goes_to_the_first_who_waits_at_the_very_border_where_it_frees() -> None:
    # One place: 0 to 2 prefill, step to 3; then the second, 3 to 5; then the third.
    rows = times(Ask(0.0, 1, 2), Ask(0.5, 1, 1), Ask(0.6, 1, 1), places=1)
    assert rows == [[2.0, 3.0], [5.0], [7.0]]


def test_an_idle_house_waits_for_the_next_request() -> None:
    assert times(Ask(0.0, 1, 1), Ask(10.0, 1, 1)) == [[2.0], [12.0]]


def test_clients_in_turn_send_the_next_request_when_one_has_ended() -> None:
    # One place, two clients, requests of one token: each prefill frees the place for the next.
    served = in_turn([Ask(0.0, 1, 1), Ask(0.0, 7, 1)], CALLS, 1, clients=2, seconds=5.0)
    assert [(row.ask.at, row.ask.prompt_tokens, row.times) for row in served] == [
        (0.0, 1, [2.0]),
        (0.0, 7, [4.0]),
        (2.0, 1, [6.0]),
        (4.0, 7, [8.0]),
    ]


@given(asks=ASKS, places=st.integers(1, 8))
def test_everyone_is_served_whole_in_the_order_of_coming_and_never_too_many_at_once(
    asks: list[Ask], places: int
) -> None:
    served = first_come(asks, CALLS, places)
    assert [row.ask for row in served] == asks
    assert [len(row.times) for row in served] == [ask.tokens for ask in asks]
    firsts = [row.times[0] for row in served]
    assert firsts == sorted(firsts)
    for row in served:
        assert row.ttft >= CALLS.prefill_s
        assert row.times == sorted(set(row.times))
    steps = sorted({end for row in served for end in row.times})
    for end in steps:
        assert sum(row.times[0] <= end <= row.times[-1] for row in served) <= places
    if asks:
        busy = sum(ask.tokens - 1 for ask in asks) + CALLS.prefill_s * len(asks)
        assert steps[-1] <= asks[-1].at + busy + CALLS.prefill_s


def test_a_full_house_is_limited_by_its_places_alone() -> None:
    served = first_come([Ask(0.0, 1, 100)] * 16, Calls(0.01, 0.01), 8)
    assert served[-1].times[-1] == pytest.approx(2 * 100 * 0.01)
