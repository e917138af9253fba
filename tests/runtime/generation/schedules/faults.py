"""Steps that fail."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from tests.runtime.generation.schedules.schedule import Schedule
from tests.runtime.generation.schedules.trial import INJECTED


def _fail(*_: object, **__: object) -> Any:
    raise HearthError(INJECTED, "the chunk fails")


@contextmanager
def failing_steps(runtime: LLMInferenceRuntime, schedule: Schedule) -> Iterator[None]:
    """Let the steps that the schedule names raise."""
    if schedule.fault == "none":
        yield
    else:
        failing = failing_decodes if schedule.fault == "decode" else failing_prefills
        with failing(runtime, schedule):
            yield


@contextmanager
def failing_decodes(runtime: LLMInferenceRuntime, schedule: Schedule) -> Iterator[None]:
    """Let decode steps and rounds raise behind the engine's run."""
    runner, numbers = runtime._runner, count()

    def failing(run: Callable[..., Any], *args: Any) -> Any:
        result = run(*args)
        return _fail() if next(numbers) in schedule.failing else result

    with ExitStack() as patches:
        for name in ("execute_vanilla_decoding_step", "execute_eagle_base_tree_decoding_step"):
            run = partial(failing, getattr(runner, name))
            patches.enter_context(patch.object(runner, name, run))
        yield


@contextmanager
def failing_prefills(runtime: LLMInferenceRuntime, schedule: Schedule) -> Iterator[None]:
    """Let chunks raise.

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
        fails = next(numbers) in schedule.failing
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
