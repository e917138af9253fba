"""Spans as an exporter gets them, once over HTTP, and the history of requests."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from structlog.testing import capture_logs

from hearth.daemon.control.messages import Trace
from hearth.daemon.exit_codes import CONFIGURATION, exit_code
from hearth.daemon.observe.observers import open_spans
from hearth.daemon.observe.tracing.overview import LIMIT, History
from hearth.daemon.observe.tracing.spans import Spans
from hearth.runtime.errors import HearthError
from hearth.runtime.request import RequestOptions
from hearth_client.protocol import ImageUsage
from tests.daemon.observe.tracing.records import record

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def made(**fields: Any) -> list[ReadableSpan]:
    """The spans of one record, that of the request first."""
    exporter = InMemorySpanExporter()
    spans = Spans("home", exporter)
    spans.add(record(**fields))
    spans.close()
    assert spans.lost == 0
    return sorted(exporter.get_finished_spans(), key=lambda span: span.kind is not SpanKind.SERVER)


def test_a_request_is_a_span_and_each_stage_a_child() -> None:
    request, *stages = made(chat=True)
    assert request.name == "chat home"
    assert request.parent is None
    began = request.start_time or 0
    told = {
        stage.name: ((stage.start_time or 0) - began, (stage.end_time or 0) - began)
        for stage in stages
    }
    expected = {
        "tokenize": (0, 1),
        "queue": (1, 5),
        "prefill": (5, 15),
        "decode": (15, 35),
        "detokenize": (15, 15.5),
    }
    assert told.keys() == expected.keys()
    for name, (begin, end) in expected.items():
        assert told[name] == pytest.approx((begin * 1e6, end * 1e6), abs=1000), name
    assert all(stage.parent == request.context for stage in stages)
    assert (request.end_time or 0) - began == pytest.approx(40e6, abs=1000)
    assert abs(time.time_ns() - (request.end_time or 0)) < 60e9


def test_a_request_has_the_attributes_of_the_conventions() -> None:
    options = RequestOptions(max_tokens=64, temperature=0.5, stop=("what a client wrote",))
    (request, *_) = made(options=options, rounds=7, drafted=35, accepted_tokens=14, cached_tokens=8)
    told = dict(request.attributes or {})
    assert {name: told[name] for name in told if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "hearth",
        "gen_ai.request.model": "home",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.id": "b09922ff-1",
        "gen_ai.response.model": "home",
        "gen_ai.response.time_to_first_chunk": 0.0155,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.usage.output_tokens": 21,
    }
    assert told["hearth.speculation.accepted"] == 14
    assert "what a client wrote" not in str(told)
    assert request.resource.attributes["service.name"] == "hearth"


def test_images_are_a_stage_between_tokens_and_queue() -> None:
    images = ImageUsage(count=2, tokens=98, cached=1)
    request, *stages = made(images=images, images_s=0.002)
    began = request.start_time or 0
    begins = {stage.name: ((stage.start_time or 0) - began) / 1e6 for stage in stages}
    assert [begins["images"], begins["queue"]] == pytest.approx([1, 3], abs=0.001)
    told = dict(request.attributes or {})
    assert (told["hearth.images.count"], told["hearth.images.tokens"]) == (2, 98)


def test_a_failure_is_an_error() -> None:
    request, *stages = made(reason="queue_full", failed=True, queue_s=0.0, prefill_s=0.0)
    assert request.status.status_code is StatusCode.ERROR
    assert (request.attributes or {})["error.type"] == "queue_full"
    assert "queue" not in {stage.name for stage in stages}


def test_a_request_is_a_child_of_its_caller_s_span() -> None:
    spans = made(traceparent=f"00-{TRACE}-{PARENT}-01")
    parent = spans[0].parent
    assert parent is not None
    assert f"{parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE}


def test_a_caller_that_samples_nothing_gets_no_spans() -> None:
    assert made(traceparent=f"00-{TRACE}-{PARENT}-00") == []


class Stuck(SpanExporter):
    """A collector that takes nothing until it is let, and then refuses."""

    def __init__(self) -> None:
        self.let = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002 - as it is called
        self.let.wait(30)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.let.set()


def test_what_is_lost_is_bounded_and_counted() -> None:
    exporter = Stuck()
    with capture_logs() as logs:
        spans = Spans("home", exporter)
        for number in range(500):
            spans.add(record(number))
        assert spans.lost == 6 * (500 - 2048 // 6)
        exporter.let.set()
        spans.close()
    assert spans.lost == 6 * 500
    assert [line["spans"] for line in logs] == [6, 6 * 500]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    heard: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=[0.01])
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", heard
        server.shutdown()
        serving.join()


def test_the_variables_of_opentelemetry_say_where_spans_go(
    collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector[0])
    monkeypatch.setenv("OTEL_SERVICE_NAME", "kitchen")
    spans = open_spans("home")
    spans.add(record())
    spans.close()
    (data,) = collector[1]
    (found,) = ExportTraceServiceRequest.FromString(data).resource_spans
    resource = {pair.key: pair.value.string_value for pair in found.resource.attributes}
    assert resource["service.name"] == "kitchen"
    assert len(found.scope_spans[0].spans) == 6


def test_without_the_extra_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(
        HearthError, match=r"pip install 'opentelemetry-exporter-otlp-proto-http>="
    ) as caught:
        open_spans("home")
    assert caught.value.field == "traces"
    assert exit_code(caught.value) == CONFIGURATION


def test_a_variable_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000")
    with pytest.raises(HearthError) as caught:
        open_spans("home")
    assert (caught.value.code, caught.value.field) == ("invalid_value", "traces")


@pytest.fixture
def history() -> History:
    kept = History()
    for number in range(1, LIMIT + 6):
        kept.add(record(number, options=RequestOptions(stop=("what a client wrote",))))
    return kept


async def test_the_last_thousand_are_kept(history: History) -> None:
    report = await history.answer(Trace(last=LIMIT))
    numbers = [one.request.partition("-")[2] for one in report.requests]
    assert numbers == [str(number) for number in range(6, LIMIT + 6)]


async def test_the_newest_are_told_where_no_request_is_named(history: History) -> None:
    assert len((await history.answer(Trace())).requests) == 20
    (newest,) = (await history.answer(Trace(last=1))).requests
    assert newest.request == f"b09922ff-{LIMIT + 5}"
    assert (await history.answer(Trace(last=0))).requests == []


async def test_a_request_is_found_by_its_id(history: History) -> None:
    (found,) = (await history.answer(Trace("b09922ff-77"))).requests
    assert found == record(77)


async def test_one_that_is_not_there_is_refused(history: History) -> None:
    with pytest.raises(HearthError) as caught:
        await history.answer(Trace("b09922ff-5"))
    assert (caught.value.code, caught.value.field) == ("unknown_request", "request")


async def test_no_text_of_a_client_is_kept_and_little_memory(history: History) -> None:
    report = msgspec.json.encode(await history.answer(Trace(last=LIMIT)))
    assert b"what a client wrote" not in report
    assert len(report) < LIMIT << 10
