"""The way of spans to a collector, as OpenTelemetry's own variables say."""

import logging
from typing import TYPE_CHECKING

from hearth.runtime.errors import HearthError
from hearth.runtime.packages import pip_install

if TYPE_CHECKING:
    from hearth.daemon.observe.tracing.spans import Spans


def open_spans(model: str) -> "Spans":
    """Spans that go out by OTLP over HTTP; raises HearthError for what is missing or wrong."""
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
