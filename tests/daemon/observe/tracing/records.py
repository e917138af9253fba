from __future__ import annotations

from typing import Any

from hearth.daemon.door.finished import FinishedRequest


def record(number: int = 1, **fields: Any) -> FinishedRequest:
    """A generation that ended well: 40 ms in all, each stage with a time of its own."""
    told: dict[str, Any] = {
        "request": f"b09922ff-{number}",
        "client": "kiosk",
        "reason": "stop",
        "failed": False,
        "opened": 100.0,
        "prompt_tokens": 12,
        "completion_tokens": 21,
        "tokenize_s": 0.001,
        "queue_s": 0.004,
        "prefill_s": 0.01,
        "decode_s": 0.02,
        "detokenize_s": 0.0005,
        "ttft_s": 0.0155,
        "total_s": 0.04,
        "rounds": 0,
        "drafted": 0,
        "accepted_tokens": 0,
    }
    return FinishedRequest(**{**told, **fields})
