"""Hearth as a contender, through the same object that the executor actor drives."""

import time
from pathlib import Path

from msgspec import structs

from hearth.bench.batches import rows_of
from hearth.bench.contenders.contender import Contender, Job
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions

_SPARE = 4


class HearthModel(Contender):
    """Hearth in this process, embedding lookup and sampling included."""

    def __init__(self, job: Job) -> None:
        # The folder was written by this very bench: its digests need no second look.
        # On a GPU the limit of the folder stays, as it does in a daemon: the layout of the
        # caches follows it, and with that the time of a step.
        limit = job.batch if job.device == "cpu" else 0
        threads = job.threads if job.device == "cpu" else 0
        options = RuntimeOptions(threads=threads, max_batch=limit, verify=False)
        if job.spin is not None:
            options = structs.replace(options, spin=job.spin)
        self._runtime = LLMInferenceRuntime.open(Path(job.path), options)
        self._captured = job.capture
        if job.capture:
            self._runtime.capture([job.batch])
        # Rows go on behind the last step, so that raw launches find their caches filled.
        asked = RequestOptions(max_tokens=job.steps + _SPARE, ignore_eos=True)
        self._rows = rows_of([job.prompt] * job.batch, asked)

    def prefill(self) -> int:
        """Begin the batch."""
        self._runtime.admit(self._rows)
        return self.step()

    def step(self) -> int:
        """Steps of the runtime, until the first row has a token."""
        while True:
            for token in self._runtime.step().tokens:
                if token.error is not None:
                    raise HearthError("internal", f"the row failed with {token.error}")
                return token.token_id

    def close(self) -> None:
        """Free the runtime."""
        self._runtime.close()

    def launch(self, steps: int) -> float:
        """Run the engine of the newest step again and again; its results fall on themselves."""
        runner = self._runtime._runner  # noqa: SLF001 - nobody else has a use for this
        executor, stream = runner.executor, runner._device.stream  # noqa: SLF001 - likewise
        if self._captured:
            # What a runner captures of steps may have more in it than the step.
            executor.capture_graph(stream)
        stream.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            executor.execute(stream)
        stream.synchronize()
        return time.perf_counter() - started
