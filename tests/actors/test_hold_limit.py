from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
import pytest
import zmq

from hearth.actors.addresses import DOOR, SCHEDULER, TOKENIZER
from hearth.actors.executor.actor import ExecutorActor
from hearth.actors.mailbox import Receiver, Sender, ZmqContext
from hearth.actors.messages import (
    AskReport,
    DoorMessage,
    ExecutorControl,
    ExecutorLimits,
    ExecutorMessage,
    ExecutorReady,
    Request,
    SchedulerReport,
    Shutdown,
    StepOutput,
    TokenizerMessage,
)
from hearth.actors.scheduler.actor import open_scheduler
from hearth.actors.settings import PolicySettings
from hearth.actors.supervisor_messages import SupervisorMessage
from hearth.runtime.engine_folder import write_config
from hearth.runtime.executor.simulated_engine import simulated_config, simulated_next_tokens
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions

CONFIG = simulated_config(max_batch=1, capacity=512, step_ms=2.0, prefill_chunk=16)
WORK, CONTROL, SUPERVISOR = "inproc://work", "inproc://control", "inproc://supervisor"


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for position in range(len(prompt) - 1, len(prompt) + count - 1):
        last, at = np.array([tokens[-1]]), np.array([position])
        tokens.append(int(simulated_next_tokens(last, at, CONFIG.vocab_size, (0,))[0]))
    return tokens[len(prompt) :]


@contextmanager
def executor_thread(context: ZmqContext, folder: Path) -> Iterator[None]:
    write_config(folder, CONFIG)
    to_supervisor: Sender[Any] = Sender(context, SUPERVISOR, 100)
    runtime = LLMInferenceRuntime.open(folder, RuntimeOptions())
    actor = ExecutorActor(
        name="executor-1",
        incarnation=1,
        inbox=Receiver(context, [WORK], ExecutorMessage, 100),
        control=Receiver(context, [CONTROL], ExecutorControl, 100),
        to_tokenizer=Sender(context, TOKENIZER, 1000),
        to_supervisor=to_supervisor,
        runtime=runtime,
    )
    control: Sender[Any] = Sender(context, CONTROL, 10)
    thread = threading.Thread(target=actor.run)
    thread.start()
    yield
    control.post(Shutdown())
    thread.join(10)
    assert not thread.is_alive()
    runtime.close()
    control.close()
    to_supervisor.close()


@pytest.mark.parametrize("batching", ["joining", "synchronous"])
async def test_rows_that_take_turns_get_the_tokens_that_they_would_get_alone(
    tmp_path: Path, batching: Literal["joining", "synchronous"]
) -> None:
    context: ZmqContext = zmq.Context()
    settings = PolicySettings(batching=batching, hold_s=0.05, fill_wait_ms=0.0)
    scheduler = open_scheduler(context, settings)
    tokenizer: Receiver[TokenizerMessage] = Receiver(context, [TOKENIZER], TokenizerMessage, 1000)
    door: Receiver[DoorMessage] = Receiver(context, [DOOR], DoorMessage, 100)
    supervisor: Receiver[SupervisorMessage] = Receiver(
        context, [SUPERVISOR], SupervisorMessage, 100
    )
    submit: Sender[Any] = Sender(context, SCHEDULER, 100)
    prompts = {rid: [rid + 3] * (10 * rid + 1) for rid in range(3)}
    got: dict[int, list[int]] = {rid: [] for rid in prompts}
    open_rids = set(prompts)
    with executor_thread(context, tmp_path), anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scheduler.run)
            submit.post(ExecutorReady(1, WORK, ExecutorLimits(1, 511, 512)))
            for rid, prompt in prompts.items():
                options = RequestOptions(max_tokens=120, ignore_eos=True)
                submit.post(Request(rid, options, token_ids=prompt))
            while open_rids:
                message = await tokenizer.receive()
                assert isinstance(message, StepOutput)
                if (told := message.without_tokens()) is not None:
                    submit.post(told)
                for rid, token in zip(message.rids, message.tokens, strict=True):
                    got[rid].append(token.token_id)
                    if token.finish is not None:
                        open_rids.remove(rid)
            submit.post(AskReport(1))
            loads: list[SchedulerReport] = []
            while not loads:
                answer = await door.receive()
                loads = [answer] if isinstance(answer, SchedulerReport) else []
            tasks.cancel_scope.cancel()
    assert got == {rid: expected(prompt, 120) for rid, prompt in prompts.items()}
    assert loads[0].requeued >= 6
    for mailbox in (tokenizer, door, supervisor, submit):
        mailbox.close()
    context.term()
