import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import anyio
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from hearth.actors.messages import Deltas, RowDelta
from hearth.daemon.connections import listen_on_port
from hearth.daemon.observe.metrics import endpoint as module
from hearth.daemon.observe.metrics.collector import DaemonSnapshot
from hearth.daemon.observe.metrics.endpoint import (
    CONNECTIONS,
    HEAD_BYTES,
    OPENMETRICS,
    Endpoint,
    Expose,
    Exposition,
    Form,
    open_endpoints,
    refusal_of,
)
from hearth.daemon.observe.metrics.registry import SECONDS, TOKEN_SECONDS, DaemonMetrics, TokenGaps
from hearth.daemon.service_state import STATES
from hearth.runtime.errors import CODES, HearthError
from hearth.runtime.packages import VERSION
from hearth_client.protocol import ImageUsage
from tests.daemon.observe.metrics.looks import EXECUTOR, LOOK, ended, metrics

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


async def told(form: Form = "text/plain", snapshot: DaemonSnapshot = LOOK) -> dict[str, Metric]:
    """The families of a page, as its reader has them."""
    counted = metrics(snapshot)
    counted.requests.record(ended())
    page = await counted.expose(form)
    parse = parse_openmetrics if page.content_type.startswith(OPENMETRICS) else parse_text
    return {family.name: family for family in parse(page.page.decode())}


def samples(family: Metric) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


async def test_a_page_tells_what_the_parts_hold_and_have_done() -> None:
    families = {name: samples(family) for name, family in (await told()).items()}
    (info,) = families["hearth_info"]
    assert {"toy", "simulated", "cpu", "float32", VERSION} < set(info)
    assert families["hearth_state"] == {(state,): state == "ready" for state in STATES}
    assert families["hearth_queue_requests"] == {(): 2}
    assert families["hearth_queue_tokens"] == {(): 30}
    assert families["hearth_queue_requests_limit"] == {(): 256}
    assert (families["hearth_places_used"], families["hearth_places"]) == ({(): 1}, {(): 8})
    assert families["hearth_refusals"][("queue_full",)] == 3
    assert families["hearth_graph_steps"][("base", "miss")] == 2
    assert families["hearth_graph_captures"][("base", "failed")] == 1
    assert families["hearth_engine_tokens"] == {("prefill",): 40, ("generation",): 30}
    assert families["hearth_speculation_accepted_tokens"] == {(): 9}
    assert families["hearth_engine_images"] == {("merge",): 3, ("encode",): 2}
    assert families["hearth_engine_image_tokens"] == {(): 147}
    assert families["hearth_engine_image_seconds"] == {("merge",): 0.25, ("encode",): 0.5}
    assert families["hearth_prefix_cache_hits"] == {(): 300}
    assert families["hearth_prefix_cache_queries"] == {(): 400}
    assert families["hearth_prefix_cache_bytes"] == {("device",): 128}
    assert families["hearth_prefix_cache_pinned_bytes"] == {(): 64}
    assert families["hearth_memory_bytes"] == {("weights",): 1000, ("kv_cache",): 2000}
    assert families["hearth_memory_free_bytes"] == {("host",): 5000, ("device",): 600}
    assert families["hearth_pictures_bytes"] == {(): 700}
    assert families["hearth_executor_process_resident_memory_bytes"][()] > 0


async def test_both_forms_tell_the_same() -> None:
    plain, openmetrics = await told(), await told(OPENMETRICS)
    assert plain.keys() == {name + "_info" * (name == "hearth") for name in openmetrics}


async def test_what_is_not_known_is_left_out() -> None:
    known = await told()
    snapshot = LOOK._replace(load=None, executor=None, silent_s=None, encoder_restarts=None)
    unknown = await told(snapshot=snapshot)
    silent, restarts = "hearth_executor_silent_seconds", "hearth_encoder_restarts"
    assert {"hearth_places", "hearth_engine_steps", silent, restarts} <= (
        known.keys() - unknown.keys()
    )
    assert "hearth_clients" in unknown


async def test_no_label_holds_what_is_not_in_a_closed_list() -> None:
    closed = CODES | {
        *STATES,
        *("stop", "length", "cancelled", "refused", "failed"),
        *("connection_closed", "gone", "other", "host", "device", "base", "draft", "hit", "miss"),
        *("fallback", "captured", "prefill", "generation", "draft", "verify", "commit"),
        *("encoded", "cached", "decode", "resize", "engine", "merge", "encode"),
        *("evicted", "damaged"),
        *EXECUTOR.memory,
    }
    counted = await told()
    del counted["hearth_info"]
    for family in counted.values():
        for sample in family.samples:
            values = {value for name, value in sample.labels.items() if name != "le"}
            assert values <= closed, sample.name


async def test_the_page_of_the_documentation_has_every_metric_as_it_is() -> None:
    expected = {}
    for name, family in (await told()).items():
        full = f"{name}_total" if family.type == "counter" else name
        labels = sorted({label for one in family.samples for label in one.labels} - {"le"})
        shown = ", ".join(f"`{label}`" for label in labels) or "none"
        # What the library counts of processes it describes itself, in words of its version.
        text = "" if "process_" in full else f" {family.documentation} |"
        expected[full] = f"| `{full}` | {family.type} | {shown} |{text}"
    lines = re.findall(r"^\| `.+$", PAGE.read_text(), re.MULTILINE)
    rows = {line.split("`")[1]: line for line in lines}
    assert rows.keys() == expected.keys()
    for name, row in rows.items():
        assert row.startswith(expected[name])


def value(counted: DaemonMetrics, name: str, **labels: str) -> float | None:
    return counted.registry.get_sample_value(f"hearth_{name}", labels)


def test_buckets_suit_a_millisecond_to_minutes() -> None:
    assert SECONDS[:4] == (0.001, 0.002, 0.005, 0.01)
    assert SECONDS[-1] == 500
    assert (TOKEN_SECONDS[0], TOKEN_SECONDS[-1]) == (0.0001, 5)


def test_a_reply_is_counted_once_with_its_times() -> None:
    counted = metrics()
    counted.requests.record(ended(cached_tokens=7))
    assert value(counted, "requests_total", outcome="length") == 1
    assert value(counted, "cached_prompt_tokens_total") == 7
    assert value(counted, "prompt_tokens_total") == 10
    assert value(counted, "generation_tokens_total") == 5
    for name, seconds in {
        "time_to_first_token_seconds": 0.03,
        "request_time_per_output_token_seconds": 0.1,
        "e2e_request_latency_seconds": 0.5,
        "request_tokenize_time_seconds": 0.001,
        "request_queue_time_seconds": 0.01,
        "request_prefill_time_seconds": 0.02,
        "request_decode_time_seconds": 0.4,
        "request_detokenize_time_seconds": 0.002,
    }.items():
        assert value(counted, f"{name}_count") == 1, name
        assert value(counted, f"{name}_sum") == pytest.approx(seconds), name


def test_images_are_counted_with_what_they_took() -> None:
    counted = metrics()
    images = ImageUsage(count=3, tokens=30, cached=1, decode_ms=4.0, resize_ms=2.0, engine_ms=8.0)
    counted.requests.record(ended(images=images, images_s=0.25))
    counted.requests.record(ended(images=ImageUsage(count=1, tokens=0), failed=True))
    assert value(counted, "request_images_total", result="cached") == 1
    assert value(counted, "request_images_total", result="encoded") == 2
    assert value(counted, "image_tokens_total") == 30
    assert value(counted, "request_images_time_seconds_sum") == 0.25
    assert value(counted, "request_images_time_seconds_count") == 1
    seconds = {
        one: value(counted, "image_seconds_total", stage=one) for one in ("decode", "engine")
    }
    assert seconds == {"decode": 0.004, "engine": 0.008}


@pytest.mark.parametrize(
    ("reason", "failed", "prompt_tokens", "outcome"),
    [
        ("stop", False, 3, "stop"),
        ("cancelled", False, 0, "cancelled"),
        ("left", True, 3, "cancelled"),
        ("queue_full", True, 0, "refused"),
        ("gone", True, 0, "failed"),
        ("non_finite", True, 3, "failed"),
    ],
)
def test_each_end_has_one_outcome(
    reason: str, prompt_tokens: int, outcome: str, *, failed: bool
) -> None:
    counted = metrics()
    counted.requests.record(ended(reason, failed=failed, prompt_tokens=prompt_tokens))
    outcomes = ("stop", "length", "cancelled", "refused", "failed")
    by_outcome = {one: value(counted, "requests_total", outcome=one) for one in outcomes}
    assert by_outcome == {one: float(one == outcome) for one in outcomes}
    failures = [value(counted, "request_failures_total", code=code) for code in CODES]
    assert sum(filter(None, failures)) == (reason == "non_finite")


def test_a_request_that_never_ran_leaves_no_times() -> None:
    counted = metrics()
    nothing = {"completion_tokens": 0, "queue_s": 0.0, "prefill_s": 0.0, "ttft_s": None}
    counted.requests.record(ended("deadline_exceeded", failed=True, **nothing))
    assert value(counted, "request_queue_time_seconds_count") == 0
    assert value(counted, "time_to_first_token_seconds_count") == 0
    assert value(counted, "e2e_request_latency_seconds_count") == 0
    assert value(counted, "request_failures_total", code="deadline_exceeded") == 1


def test_what_no_list_has_is_counted_as_other() -> None:
    counted = metrics()
    counted.requests.record(ended("a client's own words", failed=True))
    assert value(counted, "request_failures_total", code="other") == 1


def rows(*rids: int, ending: int = -1) -> list[RowDelta]:
    return [RowDelta(rid, "x", [1], finish="length" if rid == ending else None) for rid in rids]


def prefill(ended: float, *rids: int, ending: int = -1) -> Deltas:
    return Deltas(rows(*rids, ending=ending), ended, dict.fromkeys(rids, ended - 1))


def gaps(*steps: Deltas) -> dict[float, float]:
    """How many gaps there were of up to how many seconds, where there were some."""
    counted = TokenGaps()
    for step in steps:
        counted.step(step)
    (family,) = counted.collect()
    found, before = {}, 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket") and sample.value > before:
            found[float(sample.labels["le"])] = sample.value - before
            before = sample.value
    return found


def total(*steps: Deltas) -> float:
    counted = TokenGaps()
    for step in steps:
        counted.step(step)
    (family,) = counted.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_sum"))


def test_each_reply_of_a_step_counts() -> None:
    steps = prefill(9.0, 1, 2), Deltas(rows(1, 2), 9.15), Deltas(rows(1, 2), 9.17)
    assert gaps(*steps) == {0.02: 2, 0.2: 2}
    assert round(total(*steps), 3) == 0.34


def test_one_that_has_just_begun_waits_from_its_own_first_token() -> None:
    steps = (
        prefill(1.0, 1),
        Deltas(rows(1), 1.009),
        prefill(1.35, 2),
        Deltas(rows(1, 2), 1.4),
    )
    assert gaps(*steps) == {0.01: 1, 0.05: 1, 0.5: 1}


def test_a_pause_with_no_reply_is_no_gap() -> None:
    steps = (prefill(1.0, 1), Deltas(rows(1), 1.1), prefill(99.0, 2), Deltas(rows(2), 99.1))
    assert sum(gaps(*steps).values()) == 2
    assert round(total(*steps), 3) == 0.2


def test_one_that_was_ended_behind_its_first_token_lends_its_wait_to_nobody() -> None:
    steps = prefill(1.0, 1), prefill(99.0, 2), Deltas(rows(2), 99.1)
    assert round(total(*steps), 3) == 0.1


def test_one_that_is_cut_off_gets_no_token() -> None:
    cut = Deltas([RowDelta(1, "", [], finish="length")], 9.0)
    assert round(total(prefill(1.0, 1), Deltas(rows(1), 1.1), cut), 3) == 0.1


def test_what_never_goes_on_is_not_remembered_for_ever() -> None:
    counted = TokenGaps()
    for rid in range(3000):
        counted.step(prefill(float(rid), rid))
    assert len(vars(counted)["_begun"]) == 1024
    for rid in range(3000):
        counted.step(prefill(float(rid), rid, ending=rid))
    assert len(vars(counted)["_begun"]) == 1024


def test_one_that_ends_with_its_first_token_has_no_gap() -> None:
    steps = (
        prefill(1.0, 1),
        Deltas(rows(1), 1.1),
        prefill(1.35, 2, ending=2),
        Deltas(rows(1), 1.4),
    )
    assert round(total(*steps), 3) == 0.4


async def page(form: Form) -> Exposition:
    return Exposition("text/x", f"as {form}\n".encode())


@asynccontextmanager
async def serving(path: Path, expose: Expose = page) -> AsyncIterator[Path]:
    (endpoint,) = open_endpoints(0, str(path), expose)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(endpoint.run)
        yield path
        await endpoint.stop()


async def answer(path: Path, request: bytes) -> bytes:
    with anyio.fail_after(20):
        async with await anyio.connect_unix(path) as stream:
            await stream.send(request)
            return b"".join([data async for data in stream])


def head(first: str, **fields: str) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode()


async def test_metrics_are_got_with_their_type(short_folder: Path) -> None:
    async with serving(short_folder / "m") as path:
        assert path.stat().st_mode & 0o777 == 0o660
        got = await answer(
            path, head("GET /metrics HTTP/1.1", Host="localhost", Accept="text/plain;q=1")
        )
        got_again = await answer(path, head("GET /metrics?x=1 HTTP/1.0"))
    first, _, body = got.partition(b"\r\n\r\n")
    assert first.split(b"\r\n") == [
        b"HTTP/1.1 200 OK",
        b"Content-Type: text/x",
        b"Content-Length: 14",
        b"Connection: close",
    ]
    assert body == b"as text/plain\n"
    assert got_again.endswith(b"as text/plain\n")
    assert not path.exists()


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (head("GET / HTTP/1.1"), "404"),
        (head("GET /metrics/x HTTP/1.1"), "404"),
        (head("POST /metrics HTTP/1.1"), "405"),
        (head("HEAD /metrics HTTP/1.1"), "405"),
        (head("GET /metrics HTTP/1.1", Host="rebound.example:9000"), "403"),
        (head("GET /metrics HTTP/2"), "400"),
        (head("nonsense"), "400"),
        (b"\r\n\r\n", "400"),
        (b"\xff\xfe\x00\r\n\r\n", "400"),
        (b"GET /metr", "400"),
        (b"G" * HEAD_BYTES, "431"),
    ],
)
def test_anything_else_is_refused(request_head: bytes, status: str) -> None:
    assert (refusal_of(request_head, by_port=True) or "").startswith(status)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "localhost:1"])
def test_names_of_this_machine_may_ask(host: str) -> None:
    assert refusal_of(head("GET /metrics HTTP/1.1", HOST=host), by_port=True) is None


def test_at_a_socket_any_name_may_stand() -> None:
    assert refusal_of(head("GET /metrics HTTP/1.1", Host="hearth"), by_port=False) is None


def test_no_head_raises() -> None:
    random = Random(7)
    good = head("GET /metrics HTTP/1.1", Host="localhost:1", Accept="*/*")
    answers = set()
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(random.randrange(1, 6)):
            bad[random.randrange(len(bad))] = random.choice(b"\r\n :/GH1\0\xff")
        answers.add(refusal_of(bytes(bad), by_port=True))
    assert {one[:3] for one in answers if one} >= {"400", "403", "404", "405"}
    assert None in answers


async def test_refusals_are_answered_and_the_next_is_served(short_folder: Path) -> None:
    async with serving(short_folder / "m") as path:
        refused = await answer(path, head("PUT /metrics HTTP/1.1"))
        long = await answer(path, b"G" * HEAD_BYTES)
        good = await answer(path, head("GET /metrics HTTP/1.1"))
    assert b"\r\nAllow: GET\r\n" in refused
    assert long.startswith(b"HTTP/1.1 431")
    assert good.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", b"text/plain"),
        ("*/*", b"text/plain"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", OPENMETRICS.encode()),
        ("application/openmetrics-text;version=abc", OPENMETRICS.encode()),
    ],
)
async def test_the_form_is_the_one_that_is_accepted(
    short_folder: Path, accept: str, form: bytes
) -> None:
    async with serving(short_folder / "m") as path:
        got = await answer(path, head("GET /metrics HTTP/1.1", Accept=accept))
    assert got.endswith(b"as " + form + b"\n")


async def test_a_page_that_cannot_be_made_is_answered_and_the_next_is_served(
    short_folder: Path,
) -> None:
    asked: list[Form] = []

    async def expose(form: Form) -> Exposition:
        asked.append(form)
        if len(asked) == 1:
            raise ValueError("at fault")
        return await page(form)

    async with serving(short_folder / "m", expose) as path:
        failed = await answer(path, head("GET /metrics HTTP/1.1"))
        good = await answer(path, head("GET /metrics HTTP/1.1"))
    assert failed.startswith(b"HTTP/1.1 500")
    assert b"at fault" not in failed
    assert good.startswith(b"HTTP/1.1 200")


async def test_who_asks_without_pause_gets_the_page_that_there_is(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FRESH_S", 3600)
    asked: list[Form] = []

    async def expose(form: Form) -> Exposition:
        asked.append(form)
        return await page(form)

    async with serving(short_folder / "m", expose) as path:
        for _ in range(3):
            for accept in ("", OPENMETRICS):
                await answer(path, head("GET /metrics HTTP/1.1", Accept=accept))
        assert asked == ["text/plain", OPENMETRICS]
        monkeypatch.setattr(module, "_FRESH_S", 0)
        await answer(path, head("GET /metrics HTTP/1.1"))
    assert len(asked) == 3


async def test_connections_that_say_nothing_are_few_and_end(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_READ_S", 0.3)
    async with serving(short_folder / "m") as path:
        idle = [await anyio.connect_unix(path) for _ in range(CONNECTIONS)]
        with anyio.fail_after(20):
            assert await answer(path, b"") == b""
            for one in idle:
                async with one:
                    assert b"".join([data async for data in one]) == b""
        assert b"200 OK" in await answer(path, head("GET /metrics HTTP/1.1"))


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HearthError, match=f"port {port}") as caught:
            open_endpoints(port, "", page)
    assert (caught.value.code, caught.value.field) == ("socket_unusable", "metrics_port")


def test_a_path_that_cannot_be_is_refused_and_the_port_given_back(short_folder: Path) -> None:
    (short_folder / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(HearthError, match="not a socket") as caught:
        open_endpoints(port, str(short_folder / "file"), page)
    assert (caught.value.code, caught.value.field) == ("socket_unusable", "metrics_socket")
    again = listen_on_port(port, "metrics_port")
    assert again.getsockname() == ("127.0.0.1", port)
    again.close()


def test_none_is_opened_unasked() -> None:
    assert open_endpoints(0, "", page) == []


async def test_an_endpoint_is_closed_once(short_folder: Path) -> None:
    (endpoint,) = open_endpoints(0, str(short_folder / "m"), page)
    assert isinstance(endpoint, Endpoint)
    endpoint.close()
    (short_folder / "m").write_text("of somebody else")
    endpoint.close()
    assert (short_folder / "m").exists()
