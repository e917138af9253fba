import pytest

from daemon.metrics.registry import DaemonMetrics
from daemon.metrics.requests import SECONDS, TOKEN_SECONDS
from runtime.errors import CODES
from tests.daemon.metrics.looks import ended, metrics


def value(counted: DaemonMetrics, name: str, **labels: str) -> float | None:
    return counted.registry.get_sample_value(f"hearth_{name}", labels)


def test_buckets_suit_a_millisecond_to_minutes() -> None:
    assert SECONDS[:4] == (0.001, 0.002, 0.005, 0.01)
    assert SECONDS[-1] == 500
    assert (TOKEN_SECONDS[0], TOKEN_SECONDS[-1]) == (0.0001, 5)


def test_a_reply_is_counted_once_with_its_times() -> None:
    counted = metrics()
    counted.requests.record(ended())
    assert value(counted, "requests_total", outcome="length") == 1
    assert value(counted, "prompt_tokens_total") == 10
    assert value(counted, "generation_tokens_total") == 5
    for name, seconds in {
        "time_to_first_token_seconds": 0.03,
        "request_time_per_output_token_seconds": 0.1,
        "e2e_request_latency_seconds": 0.5,
        "request_tokenize_time_seconds": 0.001,
        "request_queue_time_seconds": 0.01,
        "request_prefill_time_seconds": 0.02,
        "request_decode_time_seconds": 0.4,
        "request_detokenize_time_seconds": 0.002,
    }.items():
        assert value(counted, f"{name}_count") == 1, name
        assert value(counted, f"{name}_sum") == pytest.approx(seconds), name


@pytest.mark.parametrize(
    ("reason", "failed", "prompt_tokens", "outcome"),
    [
        ("stop", False, 3, "stop"),
        ("cancelled", False, 0, "cancelled"),
        ("left", True, 3, "cancelled"),
        ("queue_full", True, 0, "refused"),
        ("gone", True, 0, "failed"),
        ("non_finite", True, 3, "failed"),
    ],
)
def test_each_end_has_one_outcome(
    reason: str, prompt_tokens: int, outcome: str, *, failed: bool
) -> None:
    counted = metrics()
    counted.requests.record(ended(reason, failed=failed, prompt_tokens=prompt_tokens))
    outcomes = ("stop", "length", "cancelled", "refused", "failed")
    by_outcome = {one: value(counted, "requests_total", outcome=one) for one in outcomes}
    assert by_outcome == {one: float(one == outcome) for one in outcomes}
    failures = [value(counted, "request_failures_total", code=code) for code in CODES]
    assert sum(filter(None, failures)) == (reason == "non_finite")


def test_a_request_that_never_ran_leaves_no_times() -> None:
    counted = metrics()
    nothing = {"completion_tokens": 0, "queue_s": 0.0, "prefill_s": 0.0, "ttft_s": None}
    counted.requests.record(ended("deadline_exceeded", failed=True, **nothing))
    assert value(counted, "request_queue_time_seconds_count") == 0
    assert value(counted, "time_to_first_token_seconds_count") == 0
    assert value(counted, "e2e_request_latency_seconds_count") == 0
    assert value(counted, "request_failures_total", code="deadline_exceeded") == 1


def test_what_no_list_has_is_counted_as_other() -> None:
    counted = metrics()
    counted.requests.record(ended("a client's own words", failed=True))
    assert value(counted, "request_failures_total", code="other") == 1
