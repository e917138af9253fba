import re
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from hearth.daemon.observe.metrics.collector import DaemonSnapshot
from hearth.daemon.observe.metrics.endpoint import OPENMETRICS, Form
from hearth.daemon.service_state import STATES
from hearth.runtime.errors import CODES
from hearth.runtime.packages import VERSION
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
