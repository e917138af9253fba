"""The states of the daemon, and what each is called everywhere; pure."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

State = Literal["starting", "loading", "ready", "draining", "failed"]
STATES: tuple[State, ...] = get_args(State)


class ServiceState(NamedTuple):
    """State of the daemon; the method of each event gives the next state.

    While it loads, `stage` names the step, and `share` from 0 to 1 its progress, where it is known.
    `reason` is why an executor is started again, which file it waits for, why the daemon drains, or
    why it failed. While it `refuses`, new requests have no chance to be served soon.
    """

    state: State = "starting"
    stage: str = ""
    share: float | None = None
    reason: str = ""
    refuses: bool = False

    @property
    def serves(self) -> bool:
        """True if events of the executor still change the state."""
        return self.state not in ("draining", "failed")

    def loading(self, stage: str, share: float | None) -> ServiceState:
        """State while the executor loads."""
        return self._replace(state="loading", stage=stage, share=share) if self.serves else self

    def ready(self) -> ServiceState:
        """State once the executor can work."""
        return ServiceState("ready") if self.serves else self

    def lost(self, reason: str) -> ServiceState:
        """State while a lost executor is replaced.

        A refusal because of files outlasts the loss of the executor.
        """
        reason = self.reason if self.refuses else f"the executor was lost: {reason}"
        return (
            ServiceState("starting", reason=reason, refuses=self.refuses) if self.serves else self
        )

    def held(self, reason: str, *, refuses: bool) -> ServiceState:
        """State while the next executor waits for files."""
        return ServiceState("starting", reason=reason, refuses=refuses) if self.serves else self

    def notes(self, reason: str) -> ServiceState:
        """State with the reason why pictures cannot be served beside text, or ""."""
        return self._replace(reason=reason) if self.state == "ready" else self

    def draining(self, reason: str) -> ServiceState:
        """State once a stop has begun; a later one may be more urgent."""
        return self if self.state == "failed" else ServiceState("draining", reason=reason)

    def failed(self, reason: str) -> ServiceState:
        """State once the daemon ends by this failure."""
        return ServiceState("failed", reason=reason)


def words(
    state: str,
    stage: str = "",
    share: float | None = None,
    reason: str = "",
    refuses: bool = False,  # noqa: FBT001, FBT002 - as a ServiceState has it
) -> str:
    """Format a state on one line for people: `loading: verifying, 43%`."""
    parts = [stage] if stage else []
    parts += [] if share is None else [f"{share:.0%}"]
    parts += ["requests are refused"] if refuses else []
    line = f"{state}: {', '.join(parts)}" if parts else state
    return " ".join(f"{line} ({reason})".split()) if reason else line
