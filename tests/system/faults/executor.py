"""Rows about the executor's process: killed, stopped, and failing in a step."""

import math
import os
import signal
import time
from collections.abc import Callable

from hearth.daemon.cli.errors import Failure
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Metrics, MetricsText
from hearth.daemon.own_daemon import OwnDaemon
from tests.system.faults.trial import PLACES, Trial, most, seconds_since
from tests.system.faults.wire_client import PATIENCE_S, Answer, WireClient

_ANSWER_S = 1.0
_PROGRESS_S = 3.0
_PAUSE_S = 1.0
_SLACK_S = 1.0
_KILLS = 4
_PROMPTS = 6
_GONE = 69


def executor_killed(trial: Trial) -> None:
    """The executor is killed four times where it hurts, and once more behind the last restart."""
    with trial.daemon("--restart-limit", str(_KILLS)) as daemon, trial.client(daemon) as client:
        # While replies stream.
        running = [client.generate(f"decode {n}", max_tokens=most(client)) for n in range(4)]
        for one in running:
            client.wait_for_deltas(one, 2)
        first = executor_of(daemon)
        os.kill(first, signal.SIGKILL)
        killed = time.monotonic()
        last = max(client.end(one).seconds for one in running)
        trial.at_most("decode_answer_s", last - killed, _ANSWER_S)
        trial.expect("decode_codes", {client.outcome(one) for one in running}, {"executor_failed"})
        trial.expect("ready_meanwhile", client.ask("status")["state"] == "ready", wanted=False)
        # As soon as the next one is there, and once more when it captures or tries its steps.
        waiting = client.generate("waits for all that", max_tokens=4)
        second, _ = _kill_next(daemon, client, first, lambda _status: True)
        third, trial.measured["capture_stage"] = _kill_next(daemon, client, second, _is_late)
        client.wait_for_status(lambda status: status["state"] == "ready")
        trial.measured["replaced_s"] = seconds_since(killed)
        trial.expect("waited_through_it", client.outcome(waiting), "length")
        # While long prompts are read, of which a fast engine has read some by now.
        long = "prompt " * (client.limits["prompt_tokens"] // 8)
        reading = [client.generate(f"{n} {long}", max_tokens=4) for n in range(_PROMPTS)]
        client.wait_for_status(lambda status: status["running"])
        fourth, _ = _kill_next(daemon, client, third, lambda _status: True)
        killed = time.monotonic()
        failed = [one for one in reading if client.outcome(one) == "executor_failed"]
        last = max((client.end(one).seconds for one in failed), default=math.inf)
        trial.at_most("prefill_answer_s", last - killed, _ANSWER_S)
        words = {client.outcome(one) for one in reading}
        trial.expect("prefill_other_words", words - {"executor_failed", "length"}, set())
        # No restart is left.
        last_one = client.generate("last", max_tokens=most(client))
        client.wait_for_deltas(last_one)
        _kill_next(daemon, client, fourth, lambda _status: True)
        trial.expect("last_code", client.outcome(last_one), "executor_failed")
        trial.expect("exit_code", daemon.wait(PATIENCE_S), _GONE)


def executor_hangs(trial: Trial) -> None:
    """The executor stands still for less than it may, and then for good."""
    limit = ("--progress-timeout-s", str(_PROGRESS_S))
    with trial.daemon(*limit) as daemon, trial.client(daemon) as client:
        slow = client.generate("a pause", max_tokens=most(client))
        client.wait_for_deltas(slow, 2)
        executor = executor_of(daemon)
        os.kill(executor, signal.SIGSTOP)
        client.listen(_PAUSE_S)
        os.kill(executor, signal.SIGCONT)
        before = len(client.deltas(slow))
        client.wait_for_deltas(slow, before + 10)
        trial.expect(
            "survived_a_pause", daemon.executor == executor and not client.ends(slow), True
        )
        stopped = time.monotonic()
        os.kill(executor, signal.SIGSTOP)
        trial.at_most("answer_s", client.end(slow).seconds - stopped, _PROGRESS_S + _SLACK_S)
        trial.expect("code", client.outcome(slow), "executor_failed")
        client.wait_for_status(lambda status: status["state"] == "ready")
        trial.measured["replaced_s"] = seconds_since(stopped)
        trial.expect("then", client.outcome(client.generate("again", max_tokens=4)), "length")


def executor_raises(trial: Trial) -> None:
    """Steps find no memory or a wrong shape, and no step of the engine can be captured."""
    with trial.breakable("capture") as (daemon, asked), trial.client(daemon) as client:
        trial.expect("uncaptured", client.outcome(client.generate("plain", max_tokens=8)), "length")
        executor = executor_of(daemon)
        for fault, code in (("out_of_memory", "out_of_memory"), ("shape", "executor_failed")):
            running = [
                client.generate(f"{fault} {n}", max_tokens=most(client)) for n in range(PLACES)
            ]
            for one in running:
                client.wait_for_deltas(one)
            follows = client.generate(f"follows {fault}", max_tokens=4)
            broken = time.monotonic()
            (asked / fault).touch()
            last = max(client.end(one).seconds for one in running)
            trial.at_most(f"{fault}_answer_s", last - broken, _ANSWER_S)
            trial.expect(f"{fault}_codes", {client.outcome(one) for one in running}, {code})
            trial.expect(f"{fault}_then", client.outcome(follows), "length")
        trial.expect("same_executor", daemon.executor == executor, wanted=True)
        failed = _counted(daemon, 'hearth_graph_captures_total{engine="base",result="failed"}')
        trial.at_least("failed_captures_counted", failed, 1)


def text_fails(trial: Trial) -> None:
    """The tokenizer raises on the texts of one client."""
    with trial.breakable("text") as (daemon, _), trial.client(daemon) as client:
        beside = client.generate("good", max_tokens=60)
        bad = [client.generate(f"fault {n}", max_tokens=4) for n in range(20)]
        trial.expect("codes", {client.outcome(one) for one in bad}, {"internal"})
        trial.expect("beside", client.outcome(beside), "length")
        trial.expect("then", client.outcome(client.generate("good", max_tokens=4)), "length")


def _counted(daemon: OwnDaemon, series: str) -> float:
    page = ask(Metrics(), MetricsText, str(daemon.socket)).text
    lines = [line for line in page.splitlines() if line.startswith(series)]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


def executor_of(daemon: OwnDaemon) -> int:
    """The process of a daemon's executor; raises Failure where there is none."""
    executor = daemon.executor
    if executor is None:
        raise Failure("the daemon has no executor")
    return executor


def _is_late(status: Answer) -> bool:
    return status["state"] == "ready" or status.get("stage") in {"capturing", "answering"}


def _kill_next(
    daemon: OwnDaemon, client: WireClient, before: int, moment: Callable[[Answer], bool]
) -> tuple[int, str]:
    """Kill the executor behind that of process `before` at a moment; its process and its stage."""
    status = client.wait_for_status(
        lambda status: daemon.executor not in {None, before} and moment(status)
    )
    executor = executor_of(daemon)
    os.kill(executor, signal.SIGKILL)
    return executor, str(status.get("stage") or status["state"])
