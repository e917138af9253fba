"""The states of the daemon, and what each is called everywhere; pure."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

State = Literal["starting", "loading", "ready", "draining", "failed"]
STATES: tuple[State, ...] = get_args(State)


class ServiceState(NamedTuple):
    """Where the daemon stands; each event gives the state behind it.

    While it loads, `stage` says what is done, and `share` from 0 to 1 how much of that, where it is
    known. `reason` is why an executor is started again, which file it waits for, why the daemon
    drains, or why it failed. Where it `refuses`, what comes has no chance to be served soon.
    """

    state: State = "starting"
    stage: str = ""
    share: float | None = None
    reason: str = ""
    refuses: bool = False

    @property
    def serves(self) -> bool:
        """Whether the executor's coming and going still changes the state."""
        return self.state not in ("draining", "failed")

    def loading(self, stage: str, share: float | None) -> ServiceState:
        """The executor has come as far as this."""
        return self._replace(state="loading", stage=stage, share=share) if self.serves else self

    def ready(self) -> ServiceState:
        """The executor can work."""
        return ServiceState("ready") if self.serves else self

    def lost(self, reason: str) -> ServiceState:
        """The executor has ended, or is about to, and another one will start.

        What is refused meanwhile is so because of files, whatever became of the executor.
        """
        reason = self.reason if self.refuses else f"the executor was lost: {reason}"
        return (
            ServiceState("starting", reason=reason, refuses=self.refuses) if self.serves else self
        )

    def held(self, reason: str, *, refuses: bool) -> ServiceState:
        """The next executor waits for files."""
        return ServiceState("starting", reason=reason, refuses=refuses) if self.serves else self

    def notes(self, reason: str) -> ServiceState:
        """Why pictures cannot be served beside the text, or ""."""
        return self._replace(reason=reason) if self.state == "ready" else self

    def draining(self, reason: str) -> ServiceState:
        """A stop has begun; it may become more urgent."""
        return self if self.state == "failed" else ServiceState("draining", reason=reason)

    def failed(self, reason: str) -> ServiceState:
        """The daemon ends by this failure."""
        return ServiceState("failed", reason=reason)


def words(
    state: str,
    stage: str = "",
    share: float | None = None,
    reason: str = "",
    refuses: bool = False,  # noqa: FBT001, FBT002 - as a ServiceState has it
) -> str:
    """A state on one line for people: `loading: verifying, 43%`."""
    parts = [stage] if stage else []
    parts += [] if share is None else [f"{share:.0%}"]
    parts += ["requests are refused"] if refuses else []
    line = f"{state}: {', '.join(parts)}" if parts else state
    return " ".join(f"{line} ({reason})".split()) if reason else line
