"""State shared by the parts of the front door: facts, clock, counters, and this run's epoch."""

import secrets
import time
from collections import Counter
from typing import Any

import anyio
import msgspec
from msgspec import structs

from hearth.actors.logs import request_id
from hearth.actors.messages import ExecutorLimits, SchedulerReport
from hearth.actors.settings import PolicySettings, Reloadable
from hearth.actors.supervisor_messages import ExecutorMetrics
from hearth.daemon.door.pictures import Pictures
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.service_state import ServiceState
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.grammar import available
from hearth.runtime.packages import VERSION
from hearth.runtime.text.reply_format import ReplyFormat
from hearth_client.running_clock import RunningClock


class DoorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the service for clients, with the number of concurrent generations (`places`).

    Lengths are in tokens. Requests may ask for one of `adapters`. `features` are those that not
    every service has, `tool_format` the form in which the model calls tools. `sampling` are the
    options that the model was published with.
    """

    server: str
    model: str = ""
    prompt_tokens: int = 0
    total_tokens: int = 0
    places: int = 0
    engine: dict[str, str | int | float] = {}
    adapters: list[str] = []
    features: list[str] = []
    tool_format: str = ""
    sampling: dict[str, float] = {}


def within(config: LLMEngineRunnerConfig, limits: ExecutorLimits) -> LLMEngineRunnerConfig:
    """The configuration with the limits that an executor reported."""
    return structs.replace(
        config,
        max_supported_batch_size=limits.max_batch,
        max_supported_input_length=limits.max_prompt_tokens,
        max_kv_cache_capacity=limits.max_total_tokens,
    )


def door_facts(
    queue: PolicySettings,
    model: str,
    config: LLMEngineRunnerConfig,
    engine: dict[str, str | int | float],
) -> DoorFacts:
    """Build the facts for clients; the longest prompt leaves one token for the reply."""
    longest = min(config.max_supported_input_length, config.max_kv_cache_capacity - 1)
    return DoorFacts(
        server=f"hearth {VERSION}",
        model=model,
        prompt_tokens=min(longest, queue.queue_tokens),
        total_tokens=config.max_kv_cache_capacity,
        places=config.max_supported_batch_size,
        engine=engine,
        sampling=config.sampling,
    )


def reply_facts(form: ReplyFormat | None) -> dict[str, Any]:
    """Facts of `DoorFacts` by name, of a model whose replies have this form; None is not known."""
    told = ["response_format"] if available() else []
    if form is None or form.name == "none":
        return {"features": told}
    tool_format = "hearth" if form.source == "own" else form.name
    return {"features": [*told, "reasoning", "template", "tools"], "tool_format": tool_format}


_EPOCH_BYTES = 8
_MOST_S = 0.5
"""Seconds of a lease that a pause of the daemon counts; the clock is read far more often."""


class DoorState:
    """The daemon writes `service_state`, `facts` and `metrics`; the door counts in `totals`.

    `tokens` are those of all replies that have ended. `refusals` counts by code what was refused
    before it was accepted. `load` is the scheduler's newest report to the daemon itself, and
    `reported` is set by the next one.

    `clock` is for how long clients neither speak nor read. Deadlines of requests are promises to
    the world outside and go by the monotonic clock. `pictures` is None where the model sees none.
    `queue` are the scheduler's limits of what may wait.
    """

    def __init__(
        self,
        facts: DoorFacts,
        settings: DoorSettings,
        queue: PolicySettings,
        pictures: Pictures | None = None,
    ) -> None:
        self.service_state = ServiceState()
        self.facts = facts
        self.settings = Reloadable(settings)
        self.queue = Reloadable(queue)
        self.pictures = pictures
        self.metrics: ExecutorMetrics | None = None
        self.clock = RunningClock(_MOST_S)
        self.totals: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.load: SchedulerReport | None = None
        self.reported = anyio.Event()
        self.tokens = 0
        self.epoch = secrets.token_hex(_EPOCH_BYTES)
        self._started = time.monotonic()

    def request_id(self, rid: int) -> str:
        """The id of a request in the whole daemon, for clients, logs, journal and traces."""
        return request_id(self.epoch, rid)

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started
