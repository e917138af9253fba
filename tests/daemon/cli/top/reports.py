from __future__ import annotations

from typing import Any

from hearth.daemon.control.messages import TopReport
from hearth.daemon.door.overview import OpenClient, RunningRequest
from tests.daemon.observe.tracing.records import record


def running(number: int, **fields: Any) -> RunningRequest:
    told: dict[str, Any] = {
        "request": f"b09922ff-{number}",
        "client": "kiosk",
        "state": "replying",
        "prompt_tokens": 100 + number,
        "tokens": 10 * number,
        "age_s": 20.0 - number,
    }
    return RunningRequest(**{**told, **fields})


def report(**fields: Any) -> TopReport:
    """A daemon with three open requests of two clients, and one that has failed."""
    told: dict[str, Any] = {
        "server": "hearth 0.1.0",
        "model": "home",
        "state": "ready",
        "stage": "",
        "share": None,
        "reason": "",
        "now": 150.0,
        "uptime_s": 3725.0,
        "places": 8,
        "running": 2,
        "queued": 1,
        "queued_tokens": 103,
        "tokens": 5000,
        "open": 3,
        "restarts": 1,
        "totals": {"requests": 64, "completed": 58, "cancelled": 2, "failed": 1},
        "refusals": {"queue_full": 4},
        "memory": {"daemon": 80 << 20, "executor": 3 << 30, "free": 9 << 30},
        "clients": [OpenClient("kiosk", 2, 900), OpenClient("robot in the kitchen", 1, 4100)],
        "requests": [
            running(1),
            running(2, client="robot in the kitchen", tokens=400),
            running(3, state="waiting", tokens=0),
        ],
        "errors": [record(9, reason="deadline_exceeded", failed=True, opened=138.0)],
    }
    return TopReport(**{**told, **fields})
