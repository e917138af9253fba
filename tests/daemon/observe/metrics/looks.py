"""A daemon of which everything is known, without a daemon."""

from __future__ import annotations

from typing import Any

from hearth.actors.messages import SchedulerReport
from hearth.actors.settings import PolicySettings
from hearth.actors.supervisor_messages import ExecutorMetrics
from hearth.daemon.door.finished import FinishedRequest
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.observe.metrics.collector import DaemonSnapshot
from hearth.daemon.observe.metrics.registry import DaemonMetrics
from hearth.daemon.observe.observers import metrics_info
from hearth.runtime.executor.engine import GraphCounters
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation.step_times import StageMetrics
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics
from hearth.runtime.runner.image_merge import MultimodalMetrics
from hearth.runtime.speculation.policy import EagleGenerationMetrics

EXECUTOR = ExecutorMetrics(
    StageMetrics(2, 40, 0.5),
    StageMetrics(9, 30, 1.5),
    EagleGenerationMetrics(steps=3, rounds=4, drafted=12, accepted=9, verify_s=0.25),
    {"base": GraphCounters(3, 1, "no room", 7, 2, 1), "draft": GraphCounters(hits=5)},
    {"weights": 1000, "kv_cache": 2000},
    600,
    PrefixMetrics(
        rows=4, hits=3, queried=400, reused=300, skipped=8, pinned=64, bytes={"device": 128}
    ),
    images=MultimodalMetrics(3, 147, 0.25, 2, 0.5),
)
LOOK = DaemonSnapshot(
    state="ready",
    settings=DoorSettings(clients=64),
    queue=PolicySettings(queue_requests=256),
    clients=2,
    totals={"internal_errors": 1},
    refusals={"queue_full": 3},
    load=SchedulerReport(0, 1, 8, 2, 30, 5, 6, 7, 800),
    executor=EXECUTOR,
    executor_pid=1,
    silent_s=0.5,
    restarts=1,
    lost_lines=4,
    lost_spans=6,
    free=5000,
    pictures=700,
    encoder_restarts=2,
)


def metrics(snapshot: DaemonSnapshot = LOOK) -> DaemonMetrics:
    async def looked() -> DaemonSnapshot:
        return snapshot

    return DaemonMetrics(metrics_info("toy", simulated_config()), looked)


def ended(reason: str = "length", **fields: Any) -> FinishedRequest:
    given: dict[str, Any] = {
        "request": "ab-1",
        "client": "somebody",
        "failed": False,
        "opened": 0.0,
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "tokenize_s": 0.001,
        "queue_s": 0.01,
        "prefill_s": 0.02,
        "decode_s": 0.4,
        "detokenize_s": 0.002,
        "ttft_s": 0.03,
        "total_s": 0.5,
        "rounds": 0,
        "drafted": 0,
        "accepted_tokens": 0,
    }
    return FinishedRequest(reason=reason, **{**given, **fields})
