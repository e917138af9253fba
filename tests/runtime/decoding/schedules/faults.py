"""Prefill chunks that fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.errors import HearthError
from tests.runtime.decoding.schedules.schedule import Schedule
from tests.runtime.decoding.schedules.trial import INJECTED


def _fail(*_: object, **__: object) -> Any:
    raise HearthError(INJECTED, "the chunk fails")


@contextmanager
def failing_prefills(runtime: LLMInferenceRuntime, schedule: Schedule) -> Iterator[None]:
    """Let the chunks that the schedule names raise.

    Before the engine runs, behind it, or where the draft takes the chunk, if there is a draft.
    """
    runner, numbers = runtime._runner, count()
    run, keep = runner.execute_prefill_step, runner._steps.keep
    speculation = runtime._speculation
    follow = None if speculation is None else speculation.proposer.prefilled
    fails = runs = False

    def behind(*args: Any, **kwargs: Any) -> None:
        keep(*args, **kwargs)
        if fails and runs and (schedule.fault == "behind" or follow is None):
            _fail()

    def prefill(*args: Any, **kwargs: Any) -> Any:
        nonlocal fails, runs
        fails = next(numbers) in schedule.failing and schedule.fault != "none"
        if fails and schedule.fault == "before":
            _fail()
        runs = True
        try:
            return run(*args, **kwargs)
        finally:
            runs = False

    def drafting(*args: Any, **kwargs: Any) -> Any:
        return _fail() if fails and schedule.fault == "draft" else follow(*args, **kwargs)  # type: ignore[misc] # there is one

    with (
        patch.object(runner, "execute_prefill_step", prefill),
        patch.object(runner._steps, "keep", behind),
    ):
        if speculation is None:
            yield
        else:
            with patch.object(speculation.proposer, "prefilled", drafting):
                yield
