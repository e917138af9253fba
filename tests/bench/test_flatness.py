import random

import pytest

from bench.flatness import Sample, SoakFigures, judge


def run(
    mb_per_10000: float, *, handles: int = 40, handles_growth: int = 0, warm_up_mb: float = 0.0
) -> SoakFigures:
    noise = random.Random(1)
    samples = []
    for index in range(100):
        requests = 100 * index
        rss = 80 + mb_per_10000 * requests / 10_000 + noise.uniform(-0.05, 0.05)
        rss += warm_up_mb * min(1.0, index / 15)
        samples.append(
            Sample(
                seconds=6.0 * index,
                requests=requests,
                rss_bytes=round(rss * 1e6),
                handles=handles + handles_growth * index // 100 + noise.randint(0, 1),
            )
        )
    return judge(samples, aborted=7)


def test_noise_is_flat() -> None:
    found = run(0.0)
    assert found.flat
    assert found.mb_per_10000_requests == pytest.approx(0.0, abs=0.2)
    assert (found.requests, found.aborted, found.handles) == (9900, 7, 40 + found.handles - 40)


@pytest.mark.parametrize(("growth", "flat"), [(0.5, True), (2.0, False), (50.0, False)])
def test_a_leak_is_measured_and_judged(growth: float, flat: bool) -> None:  # noqa: FBT001 - a parameter of the test
    found = run(growth)
    assert found.mb_per_10000_requests == pytest.approx(growth, abs=0.2)
    assert found.mb_per_minute == pytest.approx(growth / 10, abs=0.05)
    assert found.flat is flat


def test_growth_during_the_warm_up_does_not_count() -> None:
    assert run(0.0, warm_up_mb=30.0).flat


def test_open_handles_that_pile_up_are_not_flat() -> None:
    found = run(0.0, handles_growth=20)
    assert found.handles_growth > 5
    assert not found.flat


def test_failures_and_short_runs_are_not_flat() -> None:
    sample = Sample(seconds=0, requests=0, rss_bytes=1, handles=1)
    steady = [Sample(seconds=i, requests=i, rss_bytes=1, handles=1) for i in range(20)]
    assert judge(steady).flat
    assert not judge(steady, failed=1).flat
    assert not judge([sample, sample]).flat
