"""Rows about adapters: removed while others want them, and of many tensors with few handles."""

import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from hearth.bench.arrivals.ideal import MAX_RANK, add_adapters, write_adapter
from hearth.bench.toy_daemon import simulated_flags, toy_engine
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import AdapterAdded, AdapterRemoved, AddAdapter, RemoveAdapter
from hearth.daemon.own_daemon import OwnDaemon
from hearth.runtime.config import LORA_TARGETS, load_config
from hearth.runtime.errors import HearthError
from tests.system.faults.executor import executor_of
from tests.system.faults.trial import PLACES, STEP_MS, NotRunError, Trial, most, seconds_since
from tests.system.faults.wire_client import WireClient

_PROMPT = "the lamp is on"
_TOKENS = 40
_ANSWER_S = 1.0
_LAYERS = 29
_HANDLES = 1024
_REFUSED = 5
_MORE_HANDLES = 16
"""Handles that a daemon opens for an adapter, for who asks, and for its other work meanwhile."""
_LOOK_S = 0.001
# Nobody gives way to another adapter while the row looks on.
_FLAGS = ("--max-batch", str(PLACES), "--adapter-turn-ms", "600000", "--hold-s", "600")


def adapters_and_who_waits(trial: Trial) -> None:
    """An adapter is removed while requests wait for it; the executor dies with another active."""
    config = load_config(trial.engine)
    if not config.max_supported_lora_rank:
        raise NotRunError("the engine takes no adapters")
    with trial.daemon(*_FLAGS) as daemon, trial.client(daemon) as client:
        removed, kept = add_adapters(daemon.socket, config, 2)
        plain, adapted = (_reply(client, name) for name in ("", kept))
        client.end(plain)
        client.end(adapted)
        answers = client.tokens(plain) != client.tokens(adapted)
        trial.expect("adapter_changes_the_reply", answers, wanted=True)
        # While others run with none.
        beside = client.generate("beside", max_tokens=most(client))
        client.wait_for_deltas(beside)
        waiting = [client.generate(f"waits {n}", max_tokens=4, adapter=removed) for n in range(4)]
        client.wait_for_status(lambda status: status["queued"] == len(waiting))
        began, before = time.monotonic(), len(client.deltas(beside))
        ask(RemoveAdapter(removed), AdapterRemoved, str(daemon.socket))
        trial.expect("removed_codes", {client.outcome(one) for one in waiting}, {"adapter_unknown"})
        last = max(client.end(one).seconds for one in waiting)
        trial.at_most("removed_answer_s", last - began, _ANSWER_S)
        client.wait_for_deltas(beside, before + 2)
        trial.expect("beside_goes_on", not client.ends(beside), wanted=True)
        client.cancel(beside)
        client.end(beside)
        # While all places have the other one.
        running = [
            client.generate(f"runs {n}", max_tokens=most(client), adapter=kept)
            for n in range(PLACES)
        ]
        for one in running:
            client.wait_for_deltas(one)
        waiting = [_reply(client, name) for name in (kept, "")]
        client.wait_for_status(lambda status: status["queued"] == len(waiting))
        os.kill(executor_of(daemon), signal.SIGKILL)
        killed = time.monotonic()
        trial.expect("killed_codes", {client.outcome(one) for one in running}, {"executor_failed"})
        last = max(client.end(one).seconds for one in running)
        trial.at_most("killed_answer_s", last - killed, _ANSWER_S)
        trial.expect("waited_through_it", {client.outcome(one) for one in waiting}, {"length"})
        trial.measured["served_again_s"] = seconds_since(killed)
        for found, alone in zip(waiting, (adapted, plain), strict=True):
            trial.same_tokens(client, found, alone)
        trial.expect("adapters_then", client.ask("status")["adapters"], [kept])
        unknown = client.generate(_PROMPT, max_tokens=4, adapter=removed)
        trial.expect("removed_one_then", client.outcome(unknown), "adapter_unknown")


def many_tensors(trial: Trial) -> None:
    """An adapter of 406 tensors, and refused ones, where the daemon may have 1,024 handles."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="hearth-")))
        engine = toy_engine(folder, MAX_RANK, _LAYERS)
        config = load_config(engine)
        good = write_adapter(folder / "good", config, 1, LORA_TARGETS)
        bad = write_adapter(folder / "bad", config, 2, LORA_TARGETS[1:])
        (bad / "adapter_config.json").write_text((good / "adapter_config.json").read_text())
        daemon = OwnDaemon(folder, engine, simulated_flags(STEP_MS))
        stack.callback(daemon.kill)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (_HANDLES, _HANDLES))
        daemon.wait_until_ready()
        client = stack.enter_context(trial.client(daemon))
        beside = client.generate("beside", max_tokens=most(client))
        client.wait_for_deltas(beside)
        before = largest = _handles(daemon)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        codes = []
        for number, source in enumerate((*[bad] * _REFUSED, good)):
            adding = pool.submit(_add, daemon, f"adapter-{number}", source)
            while not adding.done():
                largest = max(largest, _handles(daemon))
                client.listen(_LOOK_S)
            codes.append(adding.result())
        trial.expect("added", codes, [*["adapter_invalid"] * _REFUSED, ""])
        trial.at_most("more_handles_at_the_most", largest - before, _MORE_HANDLES)
        trial.at_most("more_handles_then", _handles(daemon) - before, _MORE_HANDLES)
        received = len(client.deltas(beside))
        client.wait_for_deltas(beside, received + 2)
        trial.expect("beside_goes_on", not client.ends(beside), wanted=True)
        client.cancel(beside)
        client.end(beside)
        with_it = client.generate(_PROMPT, max_tokens=4, adapter=f"adapter-{_REFUSED}")
        trial.expect("with_the_adapter", client.outcome(with_it), "length")


def _add(daemon: OwnDaemon, name: str, source: Path) -> str:
    """Add an adapter; why it was refused, '' where it was not."""
    try:
        ask(AddAdapter(name, str(source)), AdapterAdded, str(daemon.socket))
    except HearthError as error:
        return error.code
    return ""


def _handles(daemon: OwnDaemon) -> int:
    return sum(1 for _ in os.scandir(f"/proc/{daemon.pid}/fd"))


def _reply(client: WireClient, adapter: str) -> str:
    """A request for a reply that can be compared with another one."""
    return client.generate(_PROMPT, max_tokens=_TOKENS, logprobs=8, adapter=adapter)
