"""Restart policy of an actor: events and clock in, actions out."""

from enum import Enum
from typing import Annotated, NamedTuple

import msgspec

from hearth.runtime.errors import Code, HearthError
from hearth.runtime.setting import setting

_OF_FILES: frozenset[Code] = frozenset(
    {"engine_corrupt", "engine_incompatible", "engine_missing", "weights_invalid"}
)
"""Codes of failures of a start that only other files can mend."""
_DOUBLINGS = 64
"""Most doublings of a pause: longer than any that is waited for, and still a finite number."""


class SupervisionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines of an actor to say hello, to load, and between two signs of progress.

    After `stable_s` seconds of work earlier restarts are forgotten. `pause_s` is the wait before
    a second restart in a row; it doubles with each further restart up to `most_pause_s`. A process
    that still exists `kill_s` seconds after it was killed hangs in the system.
    """

    load_timeout_s: Annotated[
        float, setting("How long the engine may take to load.", gt=0, le=86400, reloads=True)
    ] = 300.0
    progress_timeout_s: Annotated[
        float,
        setting(
            "How long one engine step may take before the executor counts as hung.",
            gt=0,
            le=86400,
            reloads=True,
        ),
    ] = 60.0
    restart_limit: Annotated[
        int,
        setting(
            "Restarts of a lost executor in a row before the daemon gives up.",
            ge=0,
            le=100,
            reloads=True,
        ),
    ] = 3
    hello_s: float = 30.0
    stable_s: float = 60.0
    pause_s: float = 0.5
    most_pause_s: float = 30.0
    kill_s: float = 10.0


class Start(NamedTuple):
    """Start this incarnation, the first being 1."""

    incarnation: int


class Kill(NamedTuple):
    """End the actor by force: it has missed a deadline."""

    reason: str


class AnnounceReady(NamedTuple):
    """Tell the listeners that the actor can work."""


class AnnounceLost(NamedTuple):
    """Tell the listeners that all work of the actor is lost."""

    reason: str


class AnnounceRestart(NamedTuple):
    """Tell the listeners that the actor will be started again, and why it has ended."""

    reason: str


class AnnounceHeld(NamedTuple):
    """Tell the listeners for which of its files the actor waits, and why.

    With `refuses` requests that come meanwhile are refused: they would wait too long.
    """

    error: HearthError
    refuses: bool


class GiveUp(NamedTuple):
    """End the daemon with this error."""

    error: HearthError


Action = Start | Kill | AnnounceReady | AnnounceLost | AnnounceRestart | AnnounceHeld | GiveUp


class Phase(Enum):
    """Phase of an actor."""

    PAUSED = "paused"
    STARTING = "starting"
    LOADING = "loading"
    RUNNING = "running"
    KILLED = "killed"
    HELD = "held"
    ENDED = "ended"


class Supervision:
    """Restart policy of one actor through its incarnations; no I/O.

    Feed it events; `tick` acts on the clock. An actor that fails to load the first time is not
    started again, since the same files would fail again. An actor whose files were changed later,
    or cannot be read any more, is held until `release`.
    """

    def __init__(self, name: str, settings: SupervisionSettings) -> None:
        self.phase = Phase.PAUSED
        self.incarnation = 0
        self._name = name
        self._settings = settings
        self._restarts = 0
        self._due: float | None = float("-inf")
        self._ready_since: float | None = None
        self.was_ready = self._announced = False
        self._reason = ""
        self._error: HearthError | None = None
        self.renewing = False
        """True if the actor has been asked to end so that the next one takes over."""
        self.spoiled: HearthError | None = None
        """Fault of files that changed while the actor worked on them."""
        self._refuses = self._of_files = False

    def adopt(self, settings: SupervisionSettings) -> None:
        """Use other deadlines from now on, also for the one that runs."""
        if self._due is not None and self.phase is Phase.LOADING:
            self._due += settings.load_timeout_s - self._settings.load_timeout_s
        elif self._due is not None and self.phase is Phase.RUNNING:
            self._due += settings.progress_timeout_s - self._settings.progress_timeout_s
        self._settings = settings

    def hello(self, now: float) -> None:
        """The actor has begun to load."""
        if self.phase is Phase.STARTING:
            self._enter(Phase.LOADING, now + self._settings.load_timeout_s)

    def ready(self, now: float) -> list[Action]:
        """The actor can work."""
        if self.phase not in (Phase.STARTING, Phase.LOADING):
            return []
        self._enter(Phase.RUNNING, now + self._settings.progress_timeout_s)
        self._ready_since = now
        self.was_ready = self._announced = True
        self._refuses = False
        return [AnnounceReady()]

    def progress(self, now: float) -> None:
        """Note a sign of progress."""
        if self.phase is Phase.RUNNING:
            self._due = now + self._settings.progress_timeout_s

    def failed(self, error: HearthError, *, others: bool = False) -> None:
        """Note why the actor is about to end; `others` is True if its files have changed."""
        self._error = error
        self._of_files = error.code in _OF_FILES or (others and error.code == "wrong_answer")

    def ended(self, how: str, now: float, *, well: bool = False) -> list[Action]:
        """Restart the ended actor or give up; `well` is True if it ended without a fault."""
        if self.phase is Phase.ENDED:
            return []
        self.renewing = self.renewing and well
        if not self.renewing and self.phase is not Phase.KILLED:
            self._reason = ""
        reason = self._reason or (self._error.message if self._error else how)
        actions = self._announce_loss(reason)
        if self.spoiled is not None:
            self._enter(Phase.HELD, None)
            return actions
        if self._error and self.was_ready and self._of_files:
            self._refuses = True
            self._enter(Phase.HELD, None)
            return [*actions, AnnounceHeld(self._error, refuses=True)]
        if self.renewing:
            self._enter(Phase.PAUSED, now)
            return [*actions, AnnounceRestart(reason)]
        if self._ready_since is not None and now - self._ready_since >= self._settings.stable_s:
            self._restarts = 0
        if self._restarts >= self._settings.restart_limit or (self._error and not self.was_ready):
            self._enter(Phase.ENDED, None)
            return [*actions, GiveUp(self._last_error(reason))]
        self._enter(Phase.PAUSED, now + self._pause())
        self._restarts += 1
        return [*actions, AnnounceRestart(reason)]

    def renew(self, reason: str) -> None:
        """Note that the actor was asked to end for the next one: its end is no failure."""
        self.renewing, self._reason = True, reason

    def spoil(self, error: HearthError, now: float, *, refuses: bool) -> list[Action]:
        """End the actor, one of whose files was changed, and hold the next one.

        Once requests are refused they are refused until an actor is ready.
        """
        if self.phase is Phase.ENDED:
            return []
        known, self.spoiled = self.spoiled, error
        refuses, was_refusing = refuses or self._refuses, self._refuses
        self._refuses = refuses
        told: list[Action] = []
        if known is None or known.message != error.message or refuses != was_refusing:
            told = [AnnounceHeld(error, refuses)]
        if self.phase not in (Phase.STARTING, Phase.LOADING, Phase.RUNNING):
            return told
        self._reason = error.message
        self._enter(Phase.KILLED, now + self._settings.kill_s)
        return [*self._announce_loss(self._reason), Kill(self._reason), *told]

    @property
    def held(self) -> bool:
        """True if the next actor waits for files."""
        return self.phase is Phase.HELD

    def release(self, now: float) -> None:
        """Start the actor that was held for files, which counts as no failure."""
        if self.held:
            self._enter(Phase.PAUSED, now)

    def stop(self) -> None:
        """End the policy: no later event needs an action."""
        self._enter(Phase.ENDED, None)

    def tick(self, now: float) -> list[Action]:
        """Act on a deadline that has passed."""
        if self._due is None or now < self._due:
            return []
        if self.phase is Phase.PAUSED:
            self.incarnation += 1
            self._ready_since, self._reason, self._error = None, "", None
            self.renewing, self.spoiled, self._of_files = False, None, False
            self._enter(Phase.STARTING, now + self._settings.hello_s)
            return [Start(self.incarnation)]
        if self.phase is Phase.KILLED:
            self._enter(Phase.ENDED, None)
            return [GiveUp(stuck(self._name, self._reason))]
        self._reason = self._missed()
        self._enter(Phase.KILLED, now + self._settings.kill_s)
        # Told before the end is seen: a process stuck in its driver may take its time to die.
        return [*self._announce_loss(self._reason), Kill(self._reason)]

    @property
    def working(self) -> bool:
        """True if the actor was announced as ready, and not yet as lost."""
        return self._announced

    def next_wake(self) -> float | None:
        """Time at which `tick` has something to do, if no event comes before."""
        return self._due

    def _enter(self, phase: Phase, due: float | None) -> None:
        self.phase, self._due = phase, due

    def _announce_loss(self, reason: str) -> list[Action]:
        told, self._announced = self._announced, False
        return [AnnounceLost(reason)] if told else []

    def _pause(self) -> float:
        if not self._restarts:
            return 0.0
        doubled = self._settings.pause_s * 2.0 ** min(self._restarts - 1, _DOUBLINGS)
        return min(doubled, self._settings.most_pause_s)

    def _missed(self) -> str:
        if self.phase is Phase.STARTING:
            return f"it did not say hello within {self._settings.hello_s:g} s"
        if self.phase is Phase.LOADING:
            return f"it did not load within {self._settings.load_timeout_s:g} s"
        return f"it made no progress for {self._settings.progress_timeout_s:g} s"

    def _last_error(self, reason: str) -> HearthError:
        if self._error and not self.was_ready:
            return self._error
        times = f", {self._restarts} restarts did not help" if self._restarts else ""
        code: Code = "encoder_failed" if self._name == "encoder" else "executor_failed"
        return HearthError(code, f"the {self._name} was lost{times}: {reason}", self._name)


def stuck(name: str, reason: str) -> HearthError:
    """The error of an actor whose process stays although it was killed."""
    return HearthError(
        "executor_stuck",
        f"the {name}'s process does not end although it was killed ({reason}): its driver hangs, "
        "restart the machine",
        name,
    )
