from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import structlog

from hearth.actors.executor_messages import LoadAdapter
from hearth.actors.mailbox import MailboxFull, Sender
from hearth.actors.supervisor_messages import AdapterAnswer, SupervisorMessage
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import BatchRuntime

_log = structlog.get_logger("executor")


class ExecutorAdapters:
    """Loads and unloads the adapters of an executor, and tells the supervisor what came of it."""

    def __init__(
        self, name: str, runtime: BatchRuntime, to_supervisor: Sender[SupervisorMessage]
    ) -> None:
        self._name, self._runtime, self._to_supervisor = name, runtime, to_supervisor

    def load(self, asked: LoadAdapter) -> None:
        """Let rows ask for an adapter, if it can be loaded."""
        answer = AdapterAnswer(self._name, asked.name)
        try:
            self._runtime.load_adapter(asked.name, Path(asked.folder))
        except HearthError as error:
            _log.warning("an adapter is not served", adapter=asked.name, reason=error.message)
            answer = AdapterAnswer(self._name, asked.name, error.code, error.message, error.field)
        self._answer(answer)

    def unload(self, name: str) -> None:
        """Forget an adapter that no row has any more."""
        # One that was never loaded is gone as well.
        with suppress(HearthError):
            self._runtime.unload_adapter(name)
        self._answer(AdapterAnswer(self._name, name))

    def _answer(self, answer: AdapterAnswer) -> None:
        # Who asked a supervisor that is behind does not wait for ever.
        with suppress(MailboxFull):
            self._to_supervisor.post(answer)
