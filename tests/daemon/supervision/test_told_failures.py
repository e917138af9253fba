import os
import signal
from pathlib import Path

import structlog

from hearth.actors.addresses import SocketFolder
from hearth.actors.mailbox import Sender
from hearth.actors.supervisor_messages import ActorFailed, SupervisorMessage
from tests.daemon.supervision.house import house


async def test_a_failure_that_an_executor_has_told_is_logged_once(short_folder: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with house(short_folder) as made:
            await made.wait_until(ready=True)
            inbox = SocketFolder(short_folder).supervisor("executor")
            words: Sender[SupervisorMessage] = Sender(made.context, inbox, 10)
            with words:
                words.post(ActorFailed("executor-1", "device_lost", "the GPU is gone"))
                await made.supervisor._failure_reported.wait()
            os.kill(made.pid, signal.SIGKILL)
            await made.wait_until(ready=False)
            await made.wait_until(ready=True)
    errors = [(line["event"], line["reason"]) for line in logs if line["log_level"] == "error"]
    assert errors == [("actor failed", "the GPU is gone")]
