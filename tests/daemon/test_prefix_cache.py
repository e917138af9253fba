"""What requests share through a daemon, as its clients see it."""

import os
import signal
import stat
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hearth.actors.executor.actor import FAILURE_LIMIT
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.daemon.shipped import SOURCE
from hearth.daemon.shipped_files import EXAMPLE_HOME
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.request import CacheUse
from hearth_client import CacheFull, Client, ExecutorFailed, Generation, Usage
from tests.daemon.door.harness import until

pytestmark = pytest.mark.slow
PAGE = 32
# 20 pages of the shipped model: 12 layers, keys and values of 2 heads of 32, float32.
SMALL = 20 * PAGE * 12 * 2 * 2 * 32 * 4
LINES = (
    "turn on the desk lamp",
    "and the ceiling light",
    "what is on?",
    "turn it off",
    "which lamps are there?",
    "open the blinds",
    "is the door locked?",
    "make it warmer",
    "thank you",
    "good night",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model without its draft."""
    folder = tmp_path_factory.mktemp("shipped") / "home"
    export_model(SOURCE, folder, ExportOptions(capacity=2048, max_batch=2))
    return folder


@pytest.fixture(scope="module")
def daemon(home: Path) -> Iterator[OwnDaemon]:
    """A daemon whose prefix cache is small."""
    with own_daemon(home, ("--prefix-cache-bytes", str(SMALL))) as started:
        yield started


def cached(generation: Generation) -> int:
    """How much of the prompt came from the cache, once the reply has ended."""
    generation.text()
    assert generation.done is not None
    return generation.done.usage.cached_tokens


def words(number: int) -> str:
    """A prompt of its own of some pages."""
    return " ".join(f"{number} {other} robot" for other in range(40))


def converse(client: Client, cache: CacheUse) -> tuple[list[str], list[Usage]]:
    """The replies of a chat, and what each turn took."""
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": EXAMPLE_HOME}]
    replies, usages = [], []
    for line in LINES:
        messages.append({"role": "user", "content": line})
        generation = client.generate(messages=messages, max_tokens=24, cache=cache)
        replies.append(generation.text())
        messages.append({"role": "assistant", "content": replies[-1]})
        assert generation.done is not None
        usages.append(generation.done.usage)
    return replies, usages


def test_a_chat_of_ten_turns_pays_each_token_once(daemon: OwnDaemon) -> None:
    with Client(daemon.socket) as client:
        replies, turns = converse(client, "use")
        plain, fresh = converse(client, "bypass")
        until(lambda: _prefix_rows(client) >= len(LINES))
        report = client.status().executor
    assert replies == plain
    assert [one.cached_tokens for one in [turns[0], *fresh]] == [0] * (1 + len(LINES))
    for before, one in pairwise(turns):
        # Prompt and reply, but for the reply's last token where nothing was computed behind it.
        assert one.cached_tokens >= before.prompt_tokens + before.completion_tokens - 1
    paid = sum(one.prompt_tokens - one.cached_tokens + one.completion_tokens for one in turns)
    assert paid < turns[-1].prompt_tokens + turns[-1].completion_tokens + len(LINES)
    assert report is not None
    assert report.prefix is not None
    assert report.prefix.hits >= len(LINES) - 1
    assert report.prefix.bytes["device"] > 0


def test_a_system_prompt_of_one_client_is_there_for_the_next(daemon: OwnDaemon) -> None:
    with Client(daemon.socket) as one, Client(daemon.socket) as other:
        assert cached(one.generate(words(1), max_tokens=1, cache="bypass")) == 0
        assert cached(other.generate(words(1), max_tokens=1)) == 0
        assert cached(other.generate(words(1) + " one", max_tokens=1)) >= PAGE
        assert cached(one.generate(words(1) + " two", max_tokens=1, cache="bypass")) == 0


def test_an_executor_that_was_lost_took_cache_and_pins_along(daemon: OwnDaemon) -> None:
    prompt = "lamp and " * 20
    with Client(daemon.socket) as client:
        assert cached(client.generate(prompt, max_tokens=1, cache="pin")) == 0
        assert cached(client.generate(prompt + "x", max_tokens=1, cache="pin")) >= PAGE
        executor = daemon.executor
        assert executor is not None
        running = client.generate(words(3), max_tokens=1000, ignore_eos=True)
        next(iter(running))
        os.kill(executor, signal.SIGKILL)
        with pytest.raises(ExecutorFailed):
            running.text()
        assert cached(client.generate(prompt + "y", max_tokens=1, cache="pin")) == 0
        assert cached(client.generate(prompt + "z", max_tokens=1)) >= PAGE


def test_what_is_pinned_stays_until_its_client_leaves(daemon: OwnDaemon) -> None:
    with Client(daemon.socket) as other:
        with Client(daemon.socket) as pinning:
            assert cached(pinning.generate("the hall " * 20, max_tokens=1, cache="pin")) == 0
            flood(other, 100)
            assert cached(other.generate("the hall " * 20 + "x", max_tokens=1)) >= PAGE
            for _ in range(FAILURE_LIMIT):
                with pytest.raises(CacheFull):
                    pinning.generate("a long one " * 200, max_tokens=1, cache="pin").text()
        flood(other, 200)
        assert cached(other.generate("the hall " * 20 + "y", max_tokens=1)) == 0


def flood(client: Client, first: int) -> None:
    for number in range(first, first + 6):
        client.generate(words(number), max_tokens=1).text()


def test_files_are_private_and_serve_after_a_restart(tiny_engine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prefix"
    flags = [
        *("--engine-kind", "simulated", "--prefix-folder", str(folder)),
        *("--prefix-disk-bytes", str(64 << 20)),
    ]
    with own_daemon(tiny_engine, flags) as daemon:
        with Client(daemon.socket) as client:
            assert cached(client.generate(60 * "a", max_tokens=1)) == 0
        daemon.stop()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    with own_daemon(tiny_engine, flags) as daemon, Client(daemon.socket) as client:
        assert cached(client.generate(60 * "a" + "b", max_tokens=1)) >= PAGE


def test_replies_that_are_put_back_read_their_prompts_no_more(tiny_engine: Path) -> None:
    flags = ("--max-batch", "1", "--hold-s", "0.02", "--engine-kind", "simulated", "--step-ms", "5")
    with own_daemon(tiny_engine, flags) as daemon, Client(daemon.socket) as client:
        both = [
            client.generate(40 * letter, max_tokens=40, ignore_eos=True) for letter in ("a", "b")
        ]
        for one in both:
            one.text()
        report = client.status()
        assert report.totals["requeued"] > 1
        until(lambda: _prefix_rows(client) == report.totals["rows"])
        executor = client.status().executor
    assert executor is not None
    assert executor.prefix is not None
    # Without what was kept each of them would have read 40 tokens and its reply so far.
    again = report.totals["requeued"]
    assert executor.prefix.reused >= PAGE * again
    assert all(one.done is not None and one.done.usage.cached_tokens == 0 for one in both)


def _prefix_rows(client: Client) -> int:
    executor = client.status().executor
    return executor.prefix.rows if executor is not None and executor.prefix is not None else 0
