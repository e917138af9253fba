"""Observers of finished requests and of the daemon: metrics, traces and their way out."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hearth.actors.logs import Log
from hearth.daemon.configuration.settings import Settings
from hearth.daemon.control.messages import (
    CancelRequest,
    ControlRequest,
    Metrics,
    MetricsText,
    Top,
    Trace,
)
from hearth.daemon.control.server import Handler
from hearth.daemon.door.finished import Listener
from hearth.daemon.door.front_door import FrontDoor
from hearth.daemon.observe.metrics.collector import DaemonSnapshot
from hearth.daemon.observe.metrics.endpoint import OPENMETRICS, Endpoint, Form, open_endpoints
from hearth.daemon.observe.metrics.registry import DaemonMetrics
from hearth.daemon.observe.tracing.overview import History, Overview
from hearth.daemon.supervision.supervisor import Supervisor
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.memory.system import available_memory
from hearth.runtime.packages import VERSION, pip_install

if TYPE_CHECKING:
    from hearth.daemon.observe.tracing.spans import Spans


def open_spans(model: str) -> "Spans":
    """Spans that go out by OTLP over HTTP; raises HearthError if it is missing or wrong."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - an extra
            OTLPSpanExporter,
        )

        from hearth.daemon.observe.tracing.spans import Spans  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise HearthError(
            "unsupported_option",
            f'traces = "otlp" needs OpenTelemetry ({error.name}): {pip_install("traces")}',
            "traces",
        ) from error
    # It would write its own lines beside ours; Spans reports what is lost.
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    try:
        return Spans(model, OTLPSpanExporter())
    except (OSError, ValueError) as error:
        raise HearthError(
            "invalid_value",
            "a variable OTEL_* has a value that OpenTelemetry does not take: correct it",
            "traces",
        ) from error


class Observers:
    """Counts, keeps and exports finished requests by its `listeners`; reads the daemon's state.

    Its resources are closed at the end of `opened`.
    """

    def __init__(
        self,
        settings: Settings,
        model: str,
        config: LLMEngineRunnerConfig,
        *,
        log: Log,
        opened: ExitStack,
    ) -> None:
        self._settings = settings
        self._log = log
        self._opened = opened
        self._history = History()
        self._metrics = DaemonMetrics(metrics_info(model, config), self._snapshot)
        self.on_step = self._metrics.gaps.step
        self.listeners: list[Listener] = [self._metrics.requests.record, self._history.add]
        self._spans = open_spans(model) if settings.traces == "otlp" else None
        if self._spans is not None:
            opened.callback(self._spans.close)
            self.listeners.append(self._spans.add)

    @property
    def handlers(self) -> dict[type[ControlRequest], Handler]:
        """Handlers of control requests to the observers, once they are open."""
        overview = Overview(self._door, self._history, self._snapshot)
        return {
            Metrics: self._tell_metrics,
            Trace: self._history.answer,
            Top: overview.answer,
            CancelRequest: overview.cancel,
        }

    def open(self, door: FrontDoor, supervisors: Sequence[Supervisor]) -> list[Endpoint]:
        """Observe these parts from now on; returns metric endpoints. Raises `socket_unusable`."""
        self._door, (self._executor, *others) = door, supervisors
        self._encoder = next(iter(others), None)
        endpoints = open_endpoints(
            self._settings.metrics_port, self._settings.metrics_socket, self._metrics.expose
        )
        for endpoint in endpoints:
            self._opened.callback(endpoint.close)
        return endpoints

    async def _tell_metrics(self, asked: Metrics) -> MetricsText:
        form: Form = OPENMETRICS if asked.openmetrics else "text/plain"
        return MetricsText((await self._metrics.expose(form)).page.decode())

    async def _snapshot(self) -> DaemonSnapshot:
        door = self._door
        return DaemonSnapshot(
            state=door.state.service_state.state,
            settings=door.state.settings.current,
            queue=door.state.queue.current,
            clients=door.clients,
            totals=door.state.totals,
            refusals=door.state.refusals,
            load=await door.load(),
            executor=door.state.metrics,
            executor_pid=self._executor.pid,
            silent_s=self._executor.silent_s,
            restarts=self._executor.restarts,
            encoder_restarts=None if self._encoder is None else self._encoder.restarts,
            lost_lines=self._log.all_lost,
            lost_spans=self._spans.lost if self._spans else 0,
            free=available_memory(),
            pictures=None if door.state.pictures is None else door.state.pictures.bytes,
        )


def metrics_info(model: str, config: LLMEngineRunnerConfig) -> dict[str, str]:
    """Labels of build and model for the metrics."""
    return {
        "version": VERSION,
        "model": model,
        "backend": config.backend,
        "device": config.device,
        "dtype": config.dtype,
        "quantization": config.weight_quantization,
    }
