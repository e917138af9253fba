"""Collector of the daemon's gauges and counters, read at each scrape."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hearth.actors.messages import SchedulerReport
from hearth.actors.settings import PolicySettings
from hearth.actors.supervisor_messages import ExecutorMetrics
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.service_state import STATES
from hearth.runtime.errors import CODES
from hearth.runtime.executor.engine import GraphCounters
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics
from hearth.runtime.runner.image_merge import MultimodalMetrics
from hearth.runtime.speculation.policy import EagleGenerationMetrics


class DaemonSnapshot(NamedTuple):
    """The daemon at one moment; a value that is not known is None.

    `settings`, `queue`, `totals` and `refusals` (by code) come from the front door. `executor` is
    the executor's last report, `silent_s` the seconds since its last sign of progress, `free` the
    bytes of memory that the machine has available. A vision model also has `pictures`, the bytes of
    clients' pictures, and `encoder_restarts`.
    """

    state: str
    settings: DoorSettings
    queue: PolicySettings
    clients: int
    totals: Mapping[str, int]
    refusals: Mapping[str, int]
    load: SchedulerReport | None
    executor: ExecutorMetrics | None
    executor_pid: int | None
    silent_s: float | None
    restarts: int
    lost_lines: int
    lost_spans: int
    free: int
    pictures: int | None = None
    encoder_restarts: int | None = None


class DaemonCollector(Collector):
    """The metrics of the newest `snapshot`."""

    def __init__(self, info: Mapping[str, str]) -> None:
        self._info = dict(info)
        self.snapshot: DaemonSnapshot | None = None

    def collect(self) -> Iterator[Metric]:
        """All known metrics; none before the first snapshot."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        yield InfoMetricFamily("hearth", "1, with what serves as labels.", value=self._info)
        yield from _daemon(snapshot)
        yield from _door(snapshot)
        if snapshot.load is not None:
            yield from _load(snapshot.load)
        if snapshot.executor is not None:
            yield from _executor(snapshot.executor, sees=snapshot.pictures is not None)


def _daemon(snapshot: DaemonSnapshot) -> Iterator[Metric]:
    states = {str(state): float(state == snapshot.state) for state in STATES}
    yield _gauge("state", "1 for the state that the daemon is in, 0 for others.", state=states)
    yield _counter(
        "executor_restarts", "Starts of the executor's process behind the first.", snapshot.restarts
    )
    if snapshot.encoder_restarts is not None:
        yield _counter(
            "encoder_restarts",
            "Starts of the encoder's process behind the first.",
            snapshot.encoder_restarts,
        )
    if snapshot.silent_s is not None:
        yield _gauge(
            "executor_silent_seconds",
            "How long a working executor has told of no progress; 1 is usual.",
            snapshot.silent_s,
        )
    yield _counter(
        "log_lines_lost", "Lines that the daemon's log did not take.", snapshot.lost_lines
    )
    yield _counter(
        "spans_lost", "Spans that no collector has got: the setting `traces`.", snapshot.lost_spans
    )
    yield _gauge(
        "memory_free_bytes",
        "Memory that is free: of the host within its limits, of a device that has its own.",
        memory=_free(snapshot),
    )


def _door(snapshot: DaemonSnapshot) -> Iterator[Metric]:
    yield _gauge("clients", "Clients that are connected.", snapshot.clients)
    yield _counter(
        "refusals",
        "Messages and requests refused before they were accepted, by error code.",
        code={code: snapshot.refusals.get(code, 0) for code in sorted(CODES)},
    )
    for name, text in _TOTALS.items():
        yield _counter(name, text, snapshot.totals.get(name, 0))
    if snapshot.pictures is not None:
        yield _gauge("pictures_bytes", "What pictures of open requests take.", snapshot.pictures)
    yield _gauge("clients_limit", "The setting `clients`.", snapshot.settings.clients)
    yield _gauge(
        "queue_requests_limit", "The setting `queue_requests`.", snapshot.queue.queue_requests
    )
    yield _gauge("queue_tokens_limit", "The setting `queue_tokens`.", snapshot.queue.queue_tokens)


_TOTALS = {
    "internal_errors": "Faults of the daemon itself that it survived; its log has them.",
    "connections_closed": "Connections that were closed because clients took too much memory.",
    "tcp_connections": "Connections that came over TCP.",
    "tcp_handshakes": "Those of them that showed a key which is listed; the others are closed.",
}


def _load(load: SchedulerReport) -> Iterator[Metric]:
    yield _gauge("queue_requests", "Requests that wait for a place now.", load.queued)
    yield _gauge("queue_tokens", "Prompt tokens of the requests that wait now.", load.queued_tokens)
    yield _gauge("places", "Requests that can run at once.", load.places)
    yield _gauge("places_used", "Requests that run now.", load.running)
    if load.embeddings is not None:
        yield _gauge(
            "embeddings_bytes",
            "What the embeddings of pictures take, of open requests and kept ones.",
            load.embeddings,
        )
    yield _counter(
        "requests_placed", "Times that a request got a place, again ones among them.", load.rows
    )
    yield _counter(
        "requests_requeued",
        "Times that a request gave its place to others and queued up again.",
        load.requeued,
    )


def _executor(metrics: ExecutorMetrics, *, sees: bool) -> Iterator[Metric]:
    stages = {"prefill": metrics.prefill, "generation": metrics.generation}
    steps = {name: stage.steps for name, stage in stages.items()}
    tokens = {name: stage.tokens for name, stage in stages.items()}
    seconds = {name: stage.seconds for name, stage in stages.items()}
    yield _counter("engine_steps", "Steps of the engine, by stage.", stage=steps)
    yield _counter(
        "engine_tokens",
        "Tokens of prompts that were computed, and tokens of replies behind their first.",
        stage=tokens,
    )
    yield _counter("engine_seconds", "Time that these steps took.", stage=seconds)
    yield _gauge(
        "memory_bytes",
        "What the engine needs with all rows full, by part, as `hearth check` has it.",
        part=metrics.memory,
    )
    yield from _graphs(metrics.graphs)
    yield from _speculation(metrics.speculation)
    yield _counter("adapter_switches", "Times that replies got another adapter.", metrics.switches)
    if sees:
        yield from _images(metrics.images)
    if metrics.prefix is not None:
        yield from _prefix(metrics.prefix)


def _graphs(graphs: Mapping[str, GraphCounters]) -> Iterator[Metric]:
    labels = ("engine", "result")
    steps = CounterMetricFamily(
        "hearth_graph_steps",
        "Steps launched from a captured graph, without one, or without one that failed.",
        labels=labels,
    )
    captures = CounterMetricFamily(
        "hearth_graph_captures", "Captures of graphs, by whether they worked.", labels=labels
    )
    for engine, one in graphs.items():
        steps.add_metric((engine, "hit"), one.hits)
        steps.add_metric((engine, "miss"), one.misses)
        steps.add_metric((engine, "fallback"), one.fallbacks)
        captures.add_metric((engine, "captured"), one.captures)
        captures.add_metric((engine, "failed"), one.failed_captures)
    yield from (steps, captures)


def _speculation(done: EagleGenerationMetrics) -> Iterator[Metric]:
    seconds = {"draft": done.draft_s, "verify": done.verify_s, "commit": done.commit_s}
    yield _counter(
        "speculation_rounds", "Rounds of speculation, counted for each reply in them.", done.rounds
    )
    yield _counter(
        "speculation_drafted_tokens", "Tokens that were proposed in rounds.", done.drafted
    )
    yield _counter(
        "speculation_accepted_tokens", "Tokens that rounds gave to replies.", done.accepted
    )
    yield _counter("speculation_seconds", "Time that rounds took, by stage.", stage=seconds)


def _images(done: MultimodalMetrics) -> Iterator[Metric]:
    images = {"merge": done.images, "encode": done.encoded}
    seconds = {"merge": done.merge_seconds, "encode": done.encode_seconds}
    yield _counter(
        "engine_images", "Images that the executor put into prompts, or encoded.", stage=images
    )
    yield _counter(
        "engine_image_tokens", "Tokens of the images that it put into prompts.", done.tokens
    )
    yield _counter("engine_image_seconds", "Time that images took it, by stage.", stage=seconds)


def _prefix(cache: PrefixMetrics) -> Iterator[Metric]:
    yield _counter(
        "prefix_cache_queries",
        "Tokens of prompts that the prefix cache was asked for.",
        cache.queried,
    )
    yield _counter(
        "prefix_cache_hits",
        "Those of them that it had, so that they were not computed again.",
        cache.reused,
    )
    yield _counter(
        "prefix_cache_skipped",
        "Tokens that it had and that were computed, as to load them would have taken longer.",
        cache.skipped,
    )
    lost = {"evicted": cache.evicted, "damaged": cache.damaged}
    yield _counter("prefix_cache_lost_pages", "Pages that it gave up, by why.", reason=lost)
    yield _gauge("prefix_cache_bytes", "What it holds, by where.", tier=cache.bytes)
    yield _gauge("prefix_cache_pinned_bytes", "What clients keep of that.", cache.pinned)


def _gauge(
    name: str, text: str, value: float | None = None, **labelled: Mapping[str, float]
) -> Metric:
    return _filled(
        GaugeMetricFamily(f"hearth_{name}", text, value, list(labelled) or None), labelled
    )


def _counter(
    name: str, text: str, value: float | None = None, **labelled: Mapping[str, float]
) -> Metric:
    return _filled(
        CounterMetricFamily(f"hearth_{name}", text, value, list(labelled) or None), labelled
    )


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, labelled: Mapping[str, Mapping[str, float]]
) -> Metric:
    """A sample for each value of its one label, if it has one."""
    for values in labelled.values():
        for label, value in values.items():
            family.add_metric((label,), value)
    return family


def _free(snapshot: DaemonSnapshot) -> dict[str, int]:
    device = None if snapshot.executor is None else snapshot.executor.device_free
    return {"host": snapshot.free} | ({} if device is None else {"device": device})
