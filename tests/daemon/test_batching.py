"""How two requests share a daemon's engine, in both modes."""

import time
from pathlib import Path

import pytest

from hearth.daemon.own_daemon import own_daemon
from hearth_client import Client

# Four prompts of 60 tokens take 1 s to read, and 20 steps more until they have paid for that.
DEAR = (
    *("--engine-kind", "simulated", "--step-ms", "50", "--prefill-us", "4000"),
    *("--hold-s", "0.15", "--speculation", "off", "--prefix-cache-bytes", "0"),
)
SLOW = ("--engine-kind", "simulated", "--step-ms", "20", "--hold-s", "60")


@pytest.mark.parametrize("batching", ["joining", "synchronous"])
def test_a_short_reply_joins_a_long_one_or_waits_for_its_end(
    tiny_engine: Path, batching: str
) -> None:
    flags = (*SLOW, "--batching", batching)
    with own_daemon(tiny_engine, flags) as daemon, Client(daemon.socket) as client:
        long = client.generate("a", max_tokens=60, ignore_eos=True, timestamps=True)
        deltas = iter(long)
        first = next(deltas)
        report = client.status()
        short = client.generate("b", max_tokens=3, ignore_eos=True, timestamps=True)
        began = next(iter(short)).ended
        ended = [delta.ended for delta in deltas][-1]
        short.text()
    assert (report.running, report.places) == (1, 4)
    assert first.ended is not None
    assert began is not None
    assert ended is not None
    assert (began < ended) is (batching == "joining")
    assert short.done is not None
    waited = short.done.usage.queue_ms / 1000
    # Until the border that follows, or for the end of the other.
    assert (waited < (ended - first.ended) / 2) is (batching == "joining")
    assert short.done.usage.prefill_ms >= 20


@pytest.mark.parametrize("batching", ["joining", "synchronous"])
def test_a_client_that_floods_with_long_prompts_does_not_hold_up_another(
    tiny_engine: Path, batching: str
) -> None:
    flags = (*DEAR, "--batching", batching)
    with (
        own_daemon(tiny_engine, flags) as daemon,
        Client(daemon.socket) as flooding,
        Client(daemon.socket) as other,
    ):
        asked = {"max_tokens": 30, "ignore_eos": True, "timestamps": True}
        flood = [flooding.generate(60 * "a", **asked) for _ in range(10)]  # type: ignore[arg-type]  # options
        while flooding.status().running < 4:
            time.sleep(0.01)
        first = next(iter(other.generate("b", max_tokens=1, ignore_eos=True, timestamps=True)))
        flooding.status()
        before = [
            delta.ended is not None and first.ended is not None and delta.ended < first.ended
            for one in flood
            for delta in one._exchange.deltas
        ]
    # It waits 1.5 s, of which four prompts take 1: not for the twenty tokens that pay for those.
    assert sum(before) < 4 * 15
