from typing import Protocol

from runtime.sampling.batch import Sample


class PendingSamples(Protocol):
    """Tokens that the device may still be picking."""

    def result(self) -> list[Sample | None]:
        """Wait for the sampled rows, in their order; None where numbers were not finite.

        A row that was only checked has a sample of token -1. Raises what the step raised.
        """


class RecordedPicks(Protocol):
    """Picks of decode steps that are recorded with them; they count the slots of their rows."""

    def expect(self, rows: int) -> None:
        """From the next launch on the first `rows` are picked for; the others are padding."""

    def queue(self, rows: int) -> None:
        """Queue, for a recording, the picks of a step of at most so many rows.

        As by `BatchSampler.sample`, but that a row that is picked for has one more filled slot.
        """

    def samples(self) -> PendingSamples:
        """Those of the launch that was queued last; call it once for each."""
