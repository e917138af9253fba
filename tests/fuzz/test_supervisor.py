"""The supervisor's inbox; its actor's process is played."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import msgspec

from hearth.actors import messages as m
from hearth.actors.addresses import Addresses, SocketFolder
from hearth.actors.settings import PolicySettings
from hearth.actors.supervisor_messages import ActorReady, ExecutorMetrics, SupervisorMessage
from hearth.daemon.configuration.settings import settings_of
from hearth.daemon.door.replies import executor_report
from hearth.daemon.door.state import door_facts, within
from hearth.daemon.engine_settings import executor_plan, executor_ready
from hearth.daemon.service_state import ServiceState
from hearth.daemon.supervision.supervisor import Listeners, Supervisor
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.loading import Stage
from tests.fuzz.doors import all_mutations
from tests.fuzz.mail import CONTEXT, Inbox

ENCODE = msgspec.msgpack.encode
NAME = "executor-1"
LIMITS = m.ExecutorLimits(4, 50, 100)
GIVEN = {"name": [NAME, NAME, "executor-0"], "limits": [[4, 50, 100], None], "pid": [os.getpid()]}


class House:
    """A supervisor whose first actor has been started, and who hears of it in the daemon."""

    def __init__(self) -> None:
        self.inbox = Inbox(SupervisorMessage)
        settings = settings_of(engine_kind="simulated")
        self.config = simulated_config()
        self.service_state = ServiceState()
        self.ready = self.unfit = 0
        self.supervisor = Supervisor(
            executor_plan(settings, Path()),
            context=CONTEXT,
            sockets=SocketFolder(Path("/nowhere")),
            inbox=self.inbox,
            listeners=Listeners(
                loading=self._loading,
                ready=self._ready,
                lost=self._lost,
                restarting=lambda _: None,
                metrics=self._note_metrics,
            ),
        )
        self.begin()

    def begin(self) -> None:
        """Start the policy again, as it is when the first process has been started."""
        policy = type(self.supervisor._policy)
        plan = self.supervisor._plan
        self.supervisor._policy = policy(plan.role, plan.supervision)
        self.supervisor._policy.tick(self.supervisor._clock.now())
        self.supervisor._name = NAME

    async def tell(self, data: bytes) -> None:
        self.inbox.put(data)
        await self.inbox.handled.wait()

    def _note_metrics(self, metrics: ExecutorMetrics) -> None:
        executor_report(metrics)

    def _loading(self, stage: Stage, share: float | None) -> None:
        self.service_state.loading(stage, share)

    async def _ready(self, ready: ActorReady, addresses: Addresses) -> None:
        try:
            told = executor_ready(ready, addresses)
        except HearthError:
            # The daemon ends by this name: its executor is of no use.
            self.unfit += 1
            return
        self.ready += 1
        config = within(self.config, told.limits)
        door_facts(PolicySettings(), "toy", config, ready.facts)

    async def _lost(self, _reason: str) -> None:
        pass


async def test_every_message_to_the_supervisor() -> None:
    house = House()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(house.supervisor._listen)
        for told, data in enumerate(all_mutations("SupervisorMessage", ENCODE, GIVEN)):
            if told % 10 == 0:
                house.begin()
            await house.tell(data)
        house.begin()
        ready = house.ready
        await house.tell(ENCODE(ActorReady(NAME, 1, {}, LIMITS)))
        assert house.ready == ready + 1
        tasks.cancel_scope.cancel()
    assert house.unfit > 0
