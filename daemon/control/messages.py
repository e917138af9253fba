"""Messages between a daemon and its owner: one JSON line each.

A request is `{"t": "reload"}`, with its fields beside `t`; its answer is of the kind that belongs
to it, or `{"t": "error", ...}`.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hearth.daemon.door.finished import FinishedRequest
from hearth.daemon.door.overview import OpenClient, RunningRequest

LINE_BYTES = 64 << 10
"""The longest line that the daemon reads, its end included."""
MOST_REQUESTS = 200


class ControlRequest(msgspec.Struct, tag_field="t", frozen=True, forbid_unknown_fields=True):
    """A request of the owner."""


class ControlAnswer(msgspec.Struct, tag_field="t", frozen=True):
    """An answer of the daemon."""


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


class Trace(ControlRequest, tag="trace", frozen=True):
    """Tell of the request of that id, or without one of the `last` that have ended."""

    request: str = ""
    last: Annotated[int, Meta(ge=0, le=1000)] = 20


class TraceReport(ControlAnswer, tag="trace_report", frozen=True):
    """The requests asked for, the newest last; `now` is the daemon's monotonic clock."""

    requests: list[FinishedRequest]
    now: float


class Top(ControlRequest, tag="top", frozen=True):
    """Tell what the daemon does now."""


class TopReport(ControlAnswer, tag="top_report", frozen=True, kw_only=True):
    """Report of the daemon's work now; `now` is its monotonic clock, times are in seconds.

    `tokens` and `totals` count since the start: tokens of replies, and requests by how they ended.
    `refusals` are of messages and requests that were not taken, by code. `memory` is in bytes.
    `requests` are the `MOST_REQUESTS` oldest that are open, `errors` the newest that failed, the
    newest last. Of `prefix_queried` tokens of prompts the prefix cache had `prefix_reused`.
    """

    server: str
    model: str
    state: str
    stage: str
    share: float | None
    reason: str
    now: float
    uptime_s: float
    places: int
    running: int
    queued: int
    queued_tokens: int
    tokens: int
    open: int
    restarts: int
    totals: dict[str, int]
    refusals: dict[str, int]
    memory: dict[str, int]
    clients: list[OpenClient]
    requests: list[RunningRequest]
    errors: list[FinishedRequest]
    prefix_queried: int = 0
    prefix_reused: int = 0


class CancelRequest(ControlRequest, tag="cancel", frozen=True):
    """End an open generation: its client gets the error `cancelled_by_operator`."""

    request: str


class Cancelled(ControlAnswer, tag="cancelled", frozen=True):
    """The request has ended."""

    request: str


class AddAdapter(ControlRequest, tag="add_adapter", frozen=True):
    """Check the adapter in `folder`, an absolute path, and serve it as `name` from now on."""

    name: str
    folder: str


class AdapterAdded(ControlAnswer, tag="adapter_added", frozen=True):
    """Requests may ask for the adapter; `base` is the model that it was trained for, if known.

    `note` is a warning where that is another than the engine's.
    """

    name: str
    rank: int
    base: str
    bytes: int
    note: str = ""


class RemoveAdapter(ControlRequest, tag="remove_adapter", frozen=True):
    """Forget an adapter: requests that have it, or wait for it, end with `adapter_unknown`."""

    name: str


class AdapterRemoved(ControlAnswer, tag="adapter_removed", frozen=True):
    """The adapter is gone."""

    name: str


class ListAdapters(ControlRequest, tag="list_adapters", frozen=True):
    """Tell which adapters there are."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """An adapter; `problem` says why it is not served, "" where it is, `note` is a warning."""

    name: str
    rank: int = 0
    base: str = ""
    source: str = ""
    bytes: int = 0
    problem: str = ""
    note: str = ""


class AdapterList(ControlAnswer, tag="adapter_list", frozen=True):
    """The adapters of a folder; the engine takes them up to `max_rank`, 0 for none at all."""

    folder: str
    max_rank: int
    adapters: list[AdapterInfo]


def control_path(socket: Path) -> Path:
    """Path of the control socket of the daemon whose clients use `socket`."""
    return socket.with_name(f"{socket.name}.ctl")
