from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import CapturedStep, Device, Stream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import BindingSnapshot
from hearth.runtime.runner.bindings import StepBindings
from hearth.runtime.tensors.dims import InferenceDims

Execute = Callable[[Stream], object]
"""Call that runs the prepared step."""
Work = Callable[[Execute], None]


class CapturedSteps:
    """Work around a step, captured as one launch for each step that it runs.

    Only what an engine of kernels queues can be captured within something else.
    """

    def __init__(
        self, config: LLMEngineRunnerConfig, device: Device, bindings: StepBindings
    ) -> None:
        self.takes_work = config.backend == "kernels"
        """True if work is captured with the step that begins it; else the step alone."""
        self._device = device
        self._bindings = bindings
        self._known: dict[BindingSnapshot, CapturedStep] = {}

    def capture(self, profile: int, dims: InferenceDims, work: Work) -> None:
        """Capture a step, whose inputs are filled, or all of the `work` that runs it.

        What cannot be captured is counted, and done as any other.
        """
        if not self.takes_work:
            self._bindings.capture(profile, dims)
            return
        executor = self._bindings.executor
        for _ in self._bindings.each_set(profile, dims):
            # Further steps of the work may be prepared on the way.
            snapshot = executor.snapshot
            try:
                captured = self._device.record(partial(work, executor.queue))
            except HearthError as error:
                if error.code == "device_lost":
                    raise
                executor.counters.failed_captures += 1
                executor.counters.failure = error.message
                continue
            if captured is not None:
                older = self._known.pop(snapshot, None)
                self._known[snapshot] = captured
                executor.counters.captures += 1
                if older is not None:
                    older.close()

    def run(self, work: Work, times: int = 1) -> None:
        """Do the work, which runs the prepared step so many times."""
        if not self.launch(times):
            work(self._bindings.executor.execute)

    @property
    def ready(self) -> bool:
        """True if work was captured around the prepared step."""
        return self._bindings.executor.snapshot in self._known

    def launch(self, times: int = 1) -> bool:
        """Launch the work captured around the prepared step; False if none was.

        A launch that fails has done nothing: it is counted, and returns False as well.
        """
        executor = self._bindings.executor
        captured = self._known.get(executor.snapshot) if self._known and times else None
        if captured is None:
            return False
        try:
            captured.launch(self._bindings.stream)
        except HearthError as error:
            if error.code == "device_lost":
                raise
            executor.counters.fallbacks += 1
            return False
        executor.counters.hits += times
        return True

    def close(self) -> None:
        """Free all captured work."""
        with ExitStack() as closing:
            while self._known:
                closing.callback(self._known.popitem()[1].close)
