"""How two requests share a daemon's engine, in both modes."""

from pathlib import Path

import pytest
from hearth_client import Client

from daemon.own_daemon import own_daemon

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
