"""A row about adapters: removed while requests want them, and there when the executor is not."""

import os
import signal
import time

from bench.arrivals.adapters import add_adapters
from bench.faults.executor import executor_of
from bench.faults.talk import Talk
from bench.faults.trial import PLACES, NotRunError, Trial, most, seconds_since
from daemon.control.client import ask
from daemon.control.messages import AdapterRemoved, RemoveAdapter
from runtime.config import load_config

_PROMPT = "the lamp is on"
_TOKENS = 40
_ANSWER_S = 1.0
# Nobody gives way to another adapter while the row looks on.
_FLAGS = ("--max-batch", str(PLACES), "--adapter-turn-ms", "600000", "--hold-s", "600")


def adapters_and_who_waits(trial: Trial) -> None:
    """An adapter is removed while requests wait for it; the executor dies with another active."""
    config = load_config(trial.engine)
    if not config.max_supported_lora_rank:
        raise NotRunError("the engine takes no adapters")
    with trial.daemon(*_FLAGS) as daemon, trial.talk(daemon) as talk:
        removed, kept = add_adapters(daemon.socket, config, 2)
        plain, adapted = (_reply(talk, name) for name in ("", kept))
        talk.end(plain)
        talk.end(adapted)
        answers = talk.tokens(plain) != talk.tokens(adapted)
        trial.expect("adapter_changes_the_reply", answers, wanted=True)
        # While others run with none.
        beside = talk.generate("beside", max_tokens=most(talk))
        talk.wait_for_deltas(beside)
        waiting = [talk.generate(f"waits {n}", max_tokens=4, adapter=removed) for n in range(4)]
        talk.wait_for_status(lambda status: status["queued"] == len(waiting))
        began, before = time.monotonic(), len(talk.deltas(beside))
        ask(RemoveAdapter(removed), AdapterRemoved, str(daemon.socket))
        trial.expect("removed_codes", {talk.word(one) for one in waiting}, {"adapter_unknown"})
        last = max(talk.end(one).seconds for one in waiting)
        trial.at_most("removed_answer_s", last - began, _ANSWER_S)
        talk.wait_for_deltas(beside, before + 2)
        trial.expect("beside_goes_on", not talk.ends(beside), wanted=True)
        talk.cancel(beside)
        talk.end(beside)
        # While all places have the other one.
        running = [
            talk.generate(f"runs {n}", max_tokens=most(talk), adapter=kept) for n in range(PLACES)
        ]
        for one in running:
            talk.wait_for_deltas(one)
        waiting = [_reply(talk, name) for name in (kept, "")]
        talk.wait_for_status(lambda status: status["queued"] == len(waiting))
        os.kill(executor_of(daemon), signal.SIGKILL)
        killed = time.monotonic()
        trial.expect("killed_codes", {talk.word(one) for one in running}, {"executor_failed"})
        last = max(talk.end(one).seconds for one in running)
        trial.at_most("killed_answer_s", last - killed, _ANSWER_S)
        trial.expect("waited_through_it", {talk.word(one) for one in waiting}, {"length"})
        trial.measured["served_again_s"] = seconds_since(killed)
        for found, alone in zip(waiting, (adapted, plain), strict=True):
            trial.same_tokens(talk, found, alone)
        trial.expect("adapters_then", talk.ask("status")["adapters"], [kept])
        unknown = talk.generate(_PROMPT, max_tokens=4, adapter=removed)
        trial.expect("removed_one_then", talk.word(unknown), "adapter_unknown")


def _reply(talk: Talk, adapter: str) -> str:
    """A request for a reply that can be compared with another one."""
    return talk.generate(_PROMPT, max_tokens=_TOKENS, logprobs=8, adapter=adapter)
