from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from hearth.bench.arrivals.clients import Seen, Watched
from hearth.bench.arrivals.ideal import Calls, Served
from hearth.bench.load_clients import Tally
from hearth_client.protocol import ExecutorReport, StageReport

_P50, _P99, _LONGEST = 50, 99, 100
_ONE_STEP = 1.5


class ArrivalFigures(Tally, kw_only=True, tag=False):
    """One load: times in milliseconds, `offered` in requests a second (None in a closed loop).

    `ttft` is from the time at which a request was due to the receipt of its first token, `ideal`
    the same of `first_come`, charged `decode_ms` for a decode step and for a prefill what it took
    by its tokens. `whole` is likewise the time to the last token. `gap` lies between the ends of
    the steps of two tokens of a reply.
    `tokens_per_s` counts what was generated while requests came. `places_used` are the rows of a
    decode step. `prefill_ms` is the mean of a call, `late_p99_ms` by how much the clients
    themselves were late.
    """

    offered: float | None
    ttft_p50_ms: float
    ttft_p99_ms: float
    ideal_p50_ms: float
    ideal_p99_ms: float
    whole_p99_ms: float
    whole_longest_ms: float
    ideal_whole_p99_ms: float
    ideal_whole_longest_ms: float
    gap_p99_ms: float
    gap_longest_ms: float
    tokens_per_s: float
    places_used: float
    ideal_tokens_per_s: float
    decode_ms: float
    prefill_ms: float
    late_p99_ms: float

    @property
    def tail_ratios(self) -> dict[str, float]:
        """The tails over those of `first_come`."""
        return {
            "ttft_p99": self.ttft_p99_ms / self.ideal_p99_ms,
            "whole_p99": self.whole_p99_ms / self.ideal_whole_p99_ms,
            "whole_longest": self.whole_longest_ms / self.ideal_whole_longest_ms,
        }

    @property
    def credible(self) -> bool:
        """True where the clients' own lateness is little: half a step, or a tenth of the waits."""
        return self.late_p99_ms <= max(self.decode_ms / 2, self.ttft_p99_ms / 10)


class Load(NamedTuple):
    """One load: requests offered, for how long, what calls took, what came and would ideally."""

    offered: float | None
    seconds: float
    calls: Calls
    watched: Watched
    ideal: Sequence[Served]


def arrival_figures(load: Load, truth: Tally) -> ArrivalFigures:
    """The figures of a load whose tokens were checked."""
    began, seconds = load.watched.began, load.seconds
    streams = [one for one in load.watched.seen if one.ended]
    ttft = [one.first - one.due for one in streams]
    ideal = [one.ttft for one in load.ideal]
    whole = [one.ended[-1] - one.due for one in streams]
    ideal_whole = [one.times[-1] - one.ask.at for one in load.ideal]
    gaps = [end - before for one in streams for before, end in pairwise(one.ended)]
    within = sum(began < end <= began + seconds for one in streams for end in one.ended)
    soon = sum(end <= seconds for one in load.ideal for end in one.times)
    return ArrivalFigures(
        **{name: getattr(truth, name) for name in Tally.__struct_fields__},
        offered=load.offered,
        ttft_p50_ms=_ms(ttft, _P50),
        ttft_p99_ms=_ms(ttft, _P99),
        ideal_p50_ms=_ms(ideal, _P50),
        ideal_p99_ms=_ms(ideal, _P99),
        whole_p99_ms=_ms(whole, _P99),
        whole_longest_ms=_ms(whole, _LONGEST),
        ideal_whole_p99_ms=_ms(ideal_whole, _P99),
        ideal_whole_longest_ms=_ms(ideal_whole, _LONGEST),
        gap_p99_ms=_ms(gaps, _P99),
        gap_longest_ms=_ms(gaps, _LONGEST),
        tokens_per_s=within / seconds,
        places_used=_rows_of_a_step(streams, began + seconds),
        ideal_tokens_per_s=soon / seconds,
        decode_ms=1000 * load.calls.decode_s,
        prefill_ms=1000 * load.calls.prefill_mean_s,
        late_p99_ms=_ms(load.watched.late, _P99),
    )


def calls_of(report: ExecutorReport, seen: Sequence[Seen]) -> Calls:
    """Times of calls in the executor, from the end of one to the end of the next.

    That is what `report` says of the calls themselves, and what `seen` has between the ends of two
    decode steps besides. A prefill costs a decode step, and what it took beyond that by its
    tokens; one that was faster than a decode step costs what it took.
    """
    prefill, decode = report.prefill, report.generation
    called = decode.seconds / decode.steps
    decode_s = max(called, _decode_step_s(seen))
    mean = prefill.seconds / prefill.steps + decode_s - called
    fixed = min(decode_s, mean)
    return Calls(decode_s, fixed, (mean - fixed) * prefill.steps / prefill.tokens, mean)


def _decode_step_s(seen: Sequence[Seen]) -> float:
    """Mean seconds from the end of a step to that of the decode step right behind it."""
    ends = sorted({end for one in seen for end in one.ended})
    pairs = {pair for one in seen for pair in pairwise(one.ended)}
    steps = [end - begin for begin, end in pairwise(ends) if (begin, end) in pairs]
    # A prefill chunk that ended no prompt hides between two steps and makes them look like one.
    limit = _ONE_STEP * median(steps) if steps else 0.0
    return fmean(step for step in steps if step <= limit) if steps else 0.0


def since(before: ExecutorReport | None, after: ExecutorReport) -> ExecutorReport:
    """Work of an executor between two reports; `before` None is its start."""
    if before is None:
        return after
    return ExecutorReport(
        prefill=_less(after.prefill, before.prefill),
        generation=_less(after.generation, before.generation),
    )


def checked(seen: Sequence[Seen], truth: Callable[[Seen], Sequence[int]]) -> Tally:
    """Compare every stream with the tokens that `truth` says it must have."""
    tally = Tally()
    for one in seen:
        tally.failed += not one.reason
        tally.misended += bool(one.reason) and (one.reason, len(one.tokens)) != (
            "length",
            one.ask.tokens,
        )
        tally.check(truth(one), one.tokens)
    return tally


def full_house_rate(watched: Watched) -> float | None:
    """Tokens a second while all of the streams decode; None where they never do."""
    begin = max(one.ended[0] if one.ended else float("inf") for one in watched.seen)
    end = min(one.ended[-1] if one.ended else 0.0 for one in watched.seen)
    if end <= begin:
        return None
    tokens = sum(begin < each <= end for one in watched.seen for each in one.ended)
    return tokens / (end - begin)


def _rows_of_a_step(streams: Sequence[Seen], until: float) -> float:
    # A step that gives first tokens alone is a prefill.
    rows = Counter(end for one in streams for end in one.ended[1:] if end <= until)
    return rows.total() / len(rows) if rows else 0.0


def _less(after: StageReport, before: StageReport) -> StageReport:
    return StageReport(
        steps=after.steps - before.steps,
        tokens=after.tokens - before.tokens,
        seconds=after.seconds - before.seconds,
    )


def _ms(seconds: Sequence[float], percentile: float) -> float:
    return 1000 * float(np.percentile(seconds, percentile)) if seconds else 0.0
