from __future__ import annotations

import time
from typing import Any

from hearth.actors.mailbox import Receiver, wait_any


def next_mail(receiver: Receiver[Any], timeout_s: float) -> Any:
    """Block the thread for the next message; None after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        message = receiver.receive_nowait()
        left = deadline - time.monotonic()
        if message is not None or left <= 0:
            return message
        wait_any([receiver], left)
