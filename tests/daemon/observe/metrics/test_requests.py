import pytest

from hearth.daemon.observe.metrics.registry import DaemonMetrics
from hearth.daemon.observe.metrics.requests import SECONDS, TOKEN_SECONDS
from hearth.runtime.errors import CODES
from hearth_client.protocol import ImageUsage
from tests.daemon.observe.metrics.looks import ended, metrics


def value(counted: DaemonMetrics, name: str, **labels: str) -> float | None:
    return counted.registry.get_sample_value(f"hearth_{name}", labels)


def test_buckets_suit_a_millisecond_to_minutes() -> None:
    assert SECONDS[:4] == (0.001, 0.002, 0.005, 0.01)
    assert SECONDS[-1] == 500
    assert (TOKEN_SECONDS[0], TOKEN_SECONDS[-1]) == (0.0001, 5)


def test_a_reply_is_counted_once_with_its_times() -> None:
    counted = metrics()
    counted.requests.record(ended(cached_tokens=7))
    assert value(counted, "requests_total", outcome="length") == 1
    assert value(counted, "cached_prompt_tokens_total") == 7
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


def test_images_are_counted_with_what_they_took() -> None:
    counted = metrics()
    images = ImageUsage(count=3, tokens=30, cached=1, decode_ms=4.0, resize_ms=2.0, engine_ms=8.0)
    counted.requests.record(ended(images=images, images_s=0.25))
    counted.requests.record(ended(images=ImageUsage(count=1, tokens=0), failed=True))
    assert value(counted, "request_images_total", result="cached") == 1
    assert value(counted, "request_images_total", result="encoded") == 2
    assert value(counted, "image_tokens_total") == 30
    assert value(counted, "request_images_time_seconds_sum") == 0.25
    assert value(counted, "request_images_time_seconds_count") == 1
    seconds = {
        one: value(counted, "image_seconds_total", stage=one) for one in ("decode", "engine")
    }
    assert seconds == {"decode": 0.004, "engine": 0.008}


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
