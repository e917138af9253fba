"""What the owner of a daemon asks it, and what it answers: one JSON line each.

A request is `{"t": "reload"}`, with its fields beside `t`; its answer is of the kind that belongs
to it, or `{"t": "error", ...}`.
"""

from pathlib import Path

import msgspec

LINE_BYTES = 64 << 10
"""The longest line that the daemon reads, its end included."""


class ControlRequest(msgspec.Struct, tag_field="t", frozen=True, forbid_unknown_fields=True):
    """What is asked for."""


class ControlAnswer(msgspec.Struct, tag_field="t", frozen=True):
    """What is answered."""


class ControlError(ControlAnswer, tag="error", frozen=True):
    """A request that was refused or failed; the fields are those of a HearthError."""

    code: str
    message: str
    field: str | None = None


class Reload(ControlRequest, tag="reload", frozen=True):
    """Read the settings again and take over what can be taken over without a restart."""


class Reloaded(ControlAnswer, tag="reloaded", frozen=True):
    """Names of settings: those that have taken effect, and those that need a restart to."""

    changed: list[str]
    needs_restart: list[str]


class Metrics(ControlRequest, tag="metrics", frozen=True):
    """Tell what is counted; `openmetrics` chooses that form."""

    openmetrics: bool = False


class MetricsText(ControlAnswer, tag="metrics_text", frozen=True):
    """All metrics, in the text form of Prometheus or in OpenMetrics."""

    text: str


def control_path(socket: Path) -> Path:
    """Where the control socket of the daemon lies whose clients use `socket`."""
    return socket.with_name(f"{socket.name}.ctl")
