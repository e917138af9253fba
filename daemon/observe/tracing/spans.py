"""Spans of generations by OpenTelemetry; importing this needs the extra `traces`."""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import structlog
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from hearth.daemon.door.finished import FinishedRequest
from hearth.runtime.packages import VERSION


class Stage(NamedTuple):
    """A stage of a request, in seconds from its arrival."""

    name: str
    begin: float
    seconds: float

    @property
    def end(self) -> float:
        """End of the stage, in seconds from the request's arrival."""
        return self.begin + self.seconds


def stages(ended: FinishedRequest) -> list[Stage]:
    """The stages that a request has ended, in their order.

    Detokenizing happens in pieces, beside decoding and behind it: it is reported as one stage that
    begins with the first token.
    """
    images = ended.tokenize_s
    queue = images + ended.images_s
    prefill = queue + ended.queue_s
    decode = prefill + ended.prefill_s
    found = [
        Stage("tokenize", 0.0, ended.tokenize_s),
        Stage("images", images, ended.images_s),
        Stage("queue", queue, ended.queue_s),
        Stage("prefill", prefill, ended.prefill_s),
        Stage("decode", decode, ended.decode_s),
        Stage("detokenize", decode, ended.detokenize_s),
    ]
    return [stage for stage in found if stage.seconds > 0]


_QUEUE = 2048
"""Spans that may wait for the collector."""
_OF_A_REQUEST = 7
_TELL_S = 60.0
_CLOSE_S = 2.0
_OPTIONS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
)
_log = structlog.get_logger("hearth.traces")


class Spans:
    """Makes the spans of each generation that has ended; a thread of the SDK's sends them.

    Spans are lost and counted if `_QUEUE` spans wait already, or if the collector does not take
    them; the log tells it once a minute at most.
    """

    def __init__(self, model: str, exporter: SpanExporter) -> None:
        self._model = model
        self._delivery = _Delivery(exporter)
        ours = {"service.name": "hearth", "service.version": VERSION}
        # What the variables say wins.
        resource = Resource.create(ours).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._delivery, max_queue_size=_QUEUE))
        self._tracer = self._provider.get_tracer("hearth", VERSION)
        self._parents = TraceContextTextMapPropagator()
        self._ended = 0
        self._refused = 0
        self._reported = 0
        self._tell_at = 0.0

    @property
    def lost(self) -> int:
        """Spans that no collector has got, nor will get."""
        return self._refused + self._delivery.failed

    def add(self, ended: FinishedRequest) -> None:
        """Make the spans of a generation that has ended."""
        if self._ended - self._delivery.tried + _OF_A_REQUEST > _QUEUE:
            self._refused += 1 + len(stages(ended))
        else:
            self._make(ended)
        if self.lost > self._reported and time.monotonic() >= self._tell_at:
            self._tell_loss()

    def close(self) -> None:
        """Send waiting spans, for two seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        self._refused += self._ended - self._delivery.tried
        if self.lost > self._reported:
            self._tell_loss()

    def _tell_loss(self) -> None:
        self._tell_at = time.monotonic() + _TELL_S
        self._reported = self.lost
        _log.warning(
            "spans were lost: does a collector listen where OTEL_EXPORTER_OTLP_ENDPOINT says?",
            spans=self.lost,
        )

    def _make(self, ended: FinishedRequest) -> None:
        began = time.time() - ended.total_s
        parent = self._parents.extract({"traceparent": ended.traceparent or ""})
        span = self._tracer.start_span(
            f"{_operation(ended)} {self._model}",
            parent,
            SpanKind.SERVER,
            attributes=self._attributes(ended),
            start_time=_nanoseconds(began),
        )
        if ended.failed:
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", ended.reason)
        inside = set_span_in_context(span)
        for stage in stages(ended):
            child = self._tracer.start_span(
                stage.name, inside, start_time=_nanoseconds(began + stage.begin)
            )
            self._end(child, began + stage.end)
        self._end(span, began + ended.total_s)

    def _end(self, span: Span, moment: float) -> None:
        self._ended += span.get_span_context().trace_flags.sampled
        span.end(_nanoseconds(moment))

    def _attributes(self, ended: FinishedRequest) -> dict[str, AttributeValue]:
        """Attributes by the conventions for generative AI; no text of prompt, reply or stops."""
        asked = {
            f"gen_ai.request.{name}": value
            for name in _OPTIONS
            if (value := getattr(ended.options, name, None)) is not None
        }
        told: dict[str, AttributeValue] = {
            "gen_ai.operation.name": _operation(ended),
            "gen_ai.provider.name": "hearth",
            "gen_ai.request.model": self._model,
            "gen_ai.request.stream": True,
            "gen_ai.response.id": ended.request,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.input_tokens": ended.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
            "gen_ai.usage.output_tokens": ended.completion_tokens,
            "hearth.client": ended.client,
        }
        if not ended.failed:
            told["gen_ai.response.finish_reasons"] = [ended.reason]
        if ended.ttft_s is not None:
            told["gen_ai.response.time_to_first_chunk"] = ended.ttft_s
        if ended.rounds:
            told |= {
                "hearth.speculation.rounds": ended.rounds,
                "hearth.speculation.drafted": ended.drafted,
                "hearth.speculation.accepted": ended.accepted_tokens,
            }
        if ended.images is not None:
            told |= {
                "hearth.images.count": ended.images.count,
                "hearth.images.tokens": ended.images.tokens,
                "hearth.images.cached": ended.images.cached,
            }
        return {**asked, **told}


class _Delivery(SpanExporter):
    """Counts of spans that an exporter tried to send, and that failed; used by the SDK's thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.tried = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.failed += len(spans) if result is SpanExportResult.FAILURE else 0
            self.tried += len(spans)
        return result

    def shutdown(self) -> None:
        """End the exporter."""
        self._exporter.shutdown()


def _operation(ended: FinishedRequest) -> str:
    return "chat" if ended.chat else "text_completion"


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
