import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.daemon.check import inspect_engine
from hearth.daemon.configuration.settings import settings_of
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import (
    Cancelled,
    CancelRequest,
    Top,
    TopReport,
    Trace,
    TraceReport,
)
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.text.tokenizer import Tokenizer
from hearth_client import (
    CancelledByOperator,
    Client,
    Generation,
    UnsupportedOption,
)
from tests.daemon.door.harness import until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CAPACITY = 96
# A round of the lookup needs so many slots behind the longest row.
ROOM = 4
SLOW = ("--engine-kind", "simulated", "--step-ms", "10")
LITTLE_MEMORY = """
import sys
if "hearth.actors.host" in sys.orig_argv:
    import hearth.runtime.memory.system as system
    system.available_memory = lambda: {free}
"""


@pytest.fixture(scope="module")
def shared(tiny_engine: Path) -> Iterator[OwnDaemon]:
    """A daemon of the tiny model for tests that do it no harm."""
    with own_daemon(tiny_engine) as daemon:
        yield daemon


@pytest.fixture
def slow(tiny_engine: Path) -> Iterator[OwnDaemon]:
    """A daemon whose simulated engine takes 10 ms a step."""
    with own_daemon(tiny_engine, SLOW) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def lasting(tiny_engine: Path) -> Iterator[OwnDaemon]:
    """The same for tests after which it goes on."""
    with own_daemon(tiny_engine, SLOW) as daemon:
        yield daemon


def greedy_here(engine: Path, ids: list[int], max_tokens: int) -> tuple[list[int], str]:
    runtime = LLMInferenceRuntime.open(engine)
    try:
        row = RowRequest(
            token_ids=ids, prompt_length=len(ids), options=RequestOptions(max_tokens=max_tokens)
        )
        response = runtime.handle_request(GenerationRequest(rows=[row]), Tokenizer.open(engine))
    finally:
        runtime.close()
    return response.rows[0].token_ids, response.rows[0].text


def executor_of(daemon: OwnDaemon) -> int:
    executor = daemon.executor
    assert executor is not None
    return executor


def take(generation: Generation, deltas: int) -> None:
    for _, _ in zip(range(deltas), generation, strict=False):
        pass


def test_two_clients_at_once_get_what_the_runtime_gives_in_process(
    shared: OwnDaemon, tiny_engine: Path
) -> None:
    prompts = ["the lamp is", "a robot goes to"]
    with Client(shared.socket) as one, Client(shared.socket) as two:
        generations = [
            client.generate(prompt, max_tokens=24)
            for client, prompt in zip((one, two), prompts, strict=True)
        ]
        texts = [generation.text() for generation in generations]
        ids = [one.tokenize(prompt) for prompt in prompts]
    for generation, text, prompt_ids in zip(generations, texts, ids, strict=True):
        tokens, expected = greedy_here(tiny_engine, prompt_ids, 24)
        assert generation.tokens == tokens
        assert text == expected
        assert generation.done is not None
        assert generation.done.usage.completion_tokens == len(tokens)


def test_the_owner_sees_what_runs_and_may_end_it(tiny_engine: Path) -> None:
    # Slow enough that a test that was held up finds it running.
    flags = ("--engine-kind", "simulated", "--step-ms", "100")
    with own_daemon(tiny_engine, flags) as daemon, Client(daemon.socket, name="kiosk") as client:
        generation = client.generate("the lamp is", max_tokens=80)
        take(generation, 1)
        report = ask(Top(), TopReport, str(daemon.socket))
        ask(CancelRequest(generation.request), Cancelled, str(daemon.socket))
        with pytest.raises(CancelledByOperator):
            generation.text()
        after = ask(Top(), TopReport, str(daemon.socket))
    (running,) = report.requests
    assert (running.request, running.state) == (generation.request, "replying")
    assert (report.state, report.running, report.places) == ("ready", 1, 4)
    assert [(one.name, one.open) for one in report.clients] == [("kiosk", 1)]
    assert report.memory["daemon"] > report.memory["executor"] // 100 > 0
    assert (after.requests, after.totals["cancelled_by_operator"]) == ([], 1)
    assert [one.request for one in after.errors] == [generation.request]


def test_the_owner_sees_where_a_request_spent_its_time(shared: OwnDaemon) -> None:
    with Client(shared.socket) as client:
        generation = client.generate("the lamp is", max_tokens=8)
        generation.text()
    (found,) = ask(Trace(generation.request), TraceReport, str(shared.socket)).requests
    assert found.completion_tokens == 8
    stages = (found.tokenize_s, found.queue_s, found.prefill_s, found.decode_s)
    assert all(seconds > 0 for seconds in (*stages, found.detokenize_s))
    assert sum(stages) < found.total_s
    assert f'"request":"{found.request}"' in shared.log()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_speculation_changes_no_token_and_tells_what_it_did(
    shared: OwnDaemon, temperature: float
) -> None:
    with Client(shared.socket) as client:
        replies = [
            client.generate(
                "the lamp is the lamp is the",
                max_tokens=60,
                temperature=temperature,
                seed=5,
                logprobs=1,
                timestamps=True,
                ignore_eos=True,
                speculation=wish,
            )
            for wish in (False, True, None)
        ]
        deltas = [list(reply) for reply in replies]
        report = client.status()
    plain, asked, _ = (reply.done for reply in replies)
    assert replies[0].tokens == replies[1].tokens == replies[2].tokens
    assert len({"".join(delta.text for delta in one) for one in deltas}) == 1
    assert all(len(delta.logprobs) == len(delta.tokens) for one in deltas for delta in one)
    assert plain is not None
    assert plain.speculation is None
    assert asked is not None
    assert asked.usage.completion_tokens == 60
    if asked.speculation is not None:
        assert asked.speculation.rounds <= asked.speculation.accepted < 60
        assert report.executor is not None
    if temperature == 0.0:
        # A random model repeats itself, so that a round gives several tokens at once.
        assert asked.speculation is not None
        assert asked.speculation.accept_length > 1
        assert max(len(delta.tokens) for delta in deltas[1]) > 1


def test_speculation_is_refused_by_name_where_it_is_off(tiny_engine: Path) -> None:
    with own_daemon(tiny_engine, ["--speculation", "off"]) as daemon, Client(daemon.socket) as one:
        with pytest.raises(UnsupportedOption) as caught:
            one.generate("the lamp is", max_tokens=2, speculation=True).text()
        assert caught.value.field == "speculation"
        assert one.generate("the lamp is", max_tokens=2, speculation=False).text() is not None


def test_a_cancelled_request_ends_as_cancelled_and_the_next_one_works(lasting: OwnDaemon) -> None:
    with Client(lasting.socket) as client:
        generation = client.generate("a", max_tokens=64)
        take(generation, 3)
        generation.cancel()
        generation.text()
        assert generation.done is not None
        assert generation.done.reason == "cancelled"
        assert len(generation.tokens) < 64
        assert client.generate("a", max_tokens=4).text() is not None


def test_a_stop_lets_running_requests_end_and_removes_the_socket(slow: OwnDaemon) -> None:
    with Client(slow.socket) as client:
        generation = client.generate("a", max_tokens=40)
        take(generation, 1)
        # A service manager may signal every process of the group.
        for pid in (executor_of(slow), slow.pid):
            os.kill(pid, signal.SIGTERM)
        generation.text()
        assert generation.done is not None
        assert generation.done.usage.completion_tokens == 40
    assert slow.wait(10) == 0
    assert not slow.socket.exists()
    assert '"reason":"SIGTERM","unfinished":0' in slow.log()


def test_a_second_signal_does_not_wait_for_them(tiny_engine: Path) -> None:
    flags = ("--drain-s", "60", "--engine-kind", "simulated", "--step-ms", "200")
    with own_daemon(tiny_engine, flags) as daemon, Client(daemon.socket) as client:
        take(_kept := client.generate("a", max_tokens=80), 1)
        os.kill(daemon.pid, signal.SIGINT)
        time.sleep(0.3)
        os.kill(daemon.pid, signal.SIGINT)
        assert daemon.wait(30) == 130
        assert '"reason":"SIGINT, and a second signal","unfinished":1' in daemon.log()


def test_signals_behind_a_drain_that_is_over_change_nothing(slow: OwnDaemon) -> None:
    with Client(slow.socket) as client:
        assert client.generate("a", max_tokens=2).text() is not None
    # The end of one that hangs takes seconds, in which the daemon waits for nothing else.
    os.kill(executor_of(slow), signal.SIGSTOP)
    os.kill(slow.pid, signal.SIGTERM)
    until(lambda: not slow.socket.exists(), 10.0)

    def ended_under_signals() -> bool:
        if slow.runs:
            os.kill(slow.pid, signal.SIGTERM)
        return not slow.runs

    until(ended_under_signals, 30.0)
    assert slow.wait(1) == 0
    assert "stopping at once" not in slow.log()


def test_a_broken_engine_folder_is_refused_with_the_file_s_name(
    tiny_engine: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in tiny_engine.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    data = broken / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    daemon = OwnDaemon(tmp_path, broken)
    assert daemon.wait(20) == 78
    assert "model.onnx.data" in daemon.log().splitlines()[-1]
    assert "Traceback" not in daemon.log()


def test_a_machine_with_little_memory_gets_fewer_rows_and_is_told_why(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings_of(max_batch=1, capacity=CAPACITY, prefix_cache_bytes=0)
    needed = inspect_engine(asked, tiny_engine).memory_needed
    (tmp_path / "sitecustomize.py").write_text(LITTLE_MEMORY.format(free=needed * 8 // 7 + 8))
    path = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    with own_daemon(tiny_engine) as daemon, Client(daemon.socket) as client:
        engine = client.status().engine
        text = client.generate(prompt="hello", max_tokens=4).text()
        log = daemon.log()
    assert (engine["max_batch"], engine["capacity"], bool(text)) == (1, CAPACITY - ROOM, True)
    given, first = "no prefix cache", "a prefix cache of 256 MiB"
    why = f"1 row of {CAPACITY} tokens and {given}: 4 rows of {CAPACITY} tokens and {first} would "
    assert str(engine["chosen"]).startswith(why)
    assert why in log
