"""All metrics of one daemon in a registry of its own; a generation is counted when it has ended."""

import collections
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from hearth.actors.messages import Deltas
from hearth.daemon.door.finished import FinishedRequest
from hearth.daemon.observe.metrics.collector import DaemonCollector, DaemonSnapshot
from hearth.daemon.observe.metrics.endpoint import Exposition, Form
from hearth.runtime.errors import CODES
from hearth_client.protocol import ImageUsage

OUTCOMES = ("stop", "length", "cancelled", "refused", "failed")
ENDS = (*sorted(CODES), "connection_closed", "gone", "other")
"""Reasons of a failed request: an error code, or the fate of its connection."""


def decades(first: int, last: int) -> tuple[float, ...]:
    """1, 2 and 5 times each power of ten from `first` to `last`."""
    return tuple(
        float(f"{digit}e{power}") for power in range(first, last + 1) for digit in (1, 2, 5)
    )


SECONDS = decades(-3, 2)
TOKEN_SECONDS = decades(-4, 0)
TOKENS = tuple(float(1 << power) for power in range(0, 18, 2))
STAGES = ("decode", "resize", "engine")
"""Stages of encoding an image."""


class _Maker:
    """Makes metrics of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str) -> Counter:
        return Counter(f"hearth_{name}", text, registry=self._registry)

    def counters(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        made = Counter(f"hearth_{name}", text, [label], registry=self._registry)
        # Only what is there from the start is seen to rise with the first one.
        for value in values:
            made.labels(value)
        return made

    def histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"hearth_{name}", text, registry=self._registry, buckets=buckets)


class _ImageMetrics:
    """Metrics of images and videos."""

    def __init__(self, make: _Maker) -> None:
        self._images = make.counters(
            "request_images_total",
            "Images and videos of generations, by whether their embeddings were there from before.",
            "result",
            ("encoded", "cached"),
        )
        self._tokens = make.counter(
            "image_tokens_total", "Prompt tokens that images of generations were."
        )
        self._stages = make.counters(
            "image_seconds_total",
            "Time that images took which were encoded, by stage.",
            "stage",
            STAGES,
        )
        self._time = make.histogram(
            "request_images_time_seconds",
            "From a prompt in tokens until the embeddings of all its images were there.",
        )

    def record(self, images: ImageUsage, seconds: float) -> None:
        """Count the images of one generation, and the seconds that they took."""
        self._images.labels("cached").inc(images.cached)
        self._images.labels("encoded").inc(images.count - images.cached)
        self._tokens.inc(images.tokens)
        self._time.observe(seconds)
        for stage in STAGES:
            self._stages.labels(stage).inc(getattr(images, f"{stage}_ms") / 1000)


class RequestMetrics:
    """Counts and times of generations; no label holds what a client wrote."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Maker(registry)
        self._requests = make.counters(
            "requests_total",
            "Generations that have ended: by end token or stop string, at their limit, cancelled "
            "by their client, refused before they waited, or failed.",
            "outcome",
            OUTCOMES,
        )
        self._failed = make.counters(
            "request_failures_total",
            "Generations that failed once they were accepted, by error code, or lost their client.",
            "code",
            ENDS,
        )
        self._prompt = make.counter(
            "prompt_tokens_total", "Prompt tokens of the generations that have ended."
        )
        self._cached = make.counter(
            "cached_prompt_tokens_total", "Those of them that came from the prefix cache."
        )
        self._generated = make.counter(
            "generation_tokens_total", "Tokens that the generations which have ended gave."
        )
        self._prompt_sizes = make.histogram(
            "request_prompt_tokens", "Prompt tokens of each generation.", TOKENS
        )
        self._sizes = make.histogram(
            "request_generation_tokens", "Tokens that each generation gave.", TOKENS
        )
        self._first = make.histogram(
            "time_to_first_token_seconds",
            "From a request's arrival until its first token leaves for the client.",
        )
        self._per_token = make.histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a generation's tokens behind its first one.",
            TOKEN_SECONDS,
        )
        self._whole = make.histogram(
            "e2e_request_latency_seconds",
            "From a request's arrival until its end, of those that did not fail.",
        )
        self._tokenize = make.histogram(
            "request_tokenize_time_seconds",
            "From a request's arrival until its prompt was tokens.",
        )
        self._queue = make.histogram(
            "request_queue_time_seconds", "From a prompt in tokens, and images seen, until a place."
        )
        self._images = _ImageMetrics(make)
        self._prefill = make.histogram(
            "request_prefill_time_seconds", "From a place until the first token."
        )
        self._decode = make.histogram(
            "request_decode_time_seconds", "From the first token until the last."
        )
        self._detokenize = make.histogram(
            "request_detokenize_time_seconds",
            "What it took to turn a generation's tokens into text.",
            TOKEN_SECONDS,
        )

    def record(self, ended: FinishedRequest) -> None:
        """Count a generation that has ended."""
        self._count_outcome(ended)
        self._prompt.inc(ended.prompt_tokens)
        self._cached.inc(ended.cached_tokens)
        self._generated.inc(ended.completion_tokens)
        if ended.prompt_tokens:
            self._prompt_sizes.observe(ended.prompt_tokens)
            self._tokenize.observe(ended.tokenize_s)
        if ended.images is not None and ended.images.tokens:
            self._images.record(ended.images, ended.images_s)
        if ended.prefill_s:
            self._queue.observe(ended.queue_s)
            self._prefill.observe(ended.prefill_s)
        if ended.ttft_s is not None:
            self._first.observe(ended.ttft_s)
        if ended.completion_tokens > 1:
            self._per_token.observe(ended.decode_s / (ended.completion_tokens - 1))
        if not ended.failed:
            self._whole.observe(ended.total_s)
            self._sizes.observe(ended.completion_tokens)
            self._decode.observe(ended.decode_s)
            self._detokenize.observe(ended.detokenize_s)

    def _count_outcome(self, ended: FinishedRequest) -> None:
        if not ended.failed or ended.reason == "left":
            # A client that says goodbye cancels what it has open.
            self._requests.labels(ended.reason if ended.reason in OUTCOMES else "cancelled").inc()
            return
        # A prompt has tokens once it is in the queue.
        if not ended.prompt_tokens and ended.reason in CODES:
            self._requests.labels("refused").inc()
            return
        self._requests.labels("failed").inc()
        self._failed.labels(ended.reason if ended.reason in ENDS else "other").inc()


_MOST_ROWS = 1024
"""The largest `max_batch`."""


class TokenGaps(Collector):
    """A histogram of the times between two steps that gave a reply tokens; each reply counts.

    A decode step gives tokens to all replies that have begun: the replies of the decode step before
    it, and the replies whose first token came since, in steps with `slot_times`. At most as many
    new replies are remembered as can run at once: any more have ended already.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(TOKEN_SECONDS) + 1)
        self._sum = 0.0
        self._decoded = 0.0
        self._begun: dict[int, float] = {}

    def step(self, message: Deltas) -> None:
        """Count a step."""
        if message.slot_times:
            self._begun |= {row.rid: message.ended for row in message.rows if row.finish is None}
            while len(self._begun) > _MOST_ROWS:
                del self._begun[next(iter(self._begun))]
            return
        if not any(row.tokens for row in message.rows):
            # Replies that were cut off, by no step.
            return
        left = len(message.rows)
        if self._begun:
            first = collections.Counter(
                self._begun[row.rid] for row in message.rows if row.rid in self._begun
            )
            for ended, rows in first.items():
                self._count(message.ended - ended, rows)
            left -= first.total()
            self._begun.clear()
        self._count(message.ended - self._decoded, left)
        self._decoded = message.ended

    def collect(self) -> Iterator[Metric]:
        """The histogram."""
        bounds = [*map(str, TOKEN_SECONDS), "+Inf"]
        yield HistogramMetricFamily(
            "hearth_inter_token_latency_seconds",
            "From one token of a reply to the next; a round of speculation gives several at once.",
            buckets=list(zip(bounds, map(float, accumulate(self._counts)), strict=True)),
            sum_value=self._sum,
        )

    def _count(self, seconds: float, replies: int) -> None:
        if replies:
            self._counts[bisect_left(TOKEN_SECONDS, seconds)] += replies
            self._sum += seconds * replies


class DaemonMetrics:
    """Metrics of the daemon, and their page; `snapshot` is called for each page."""

    def __init__(
        self, info: Mapping[str, str], snapshot: Callable[[], Awaitable[DaemonSnapshot]]
    ) -> None:
        # The time at which each series began would double their number.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        self.gaps = TokenGaps()
        self.registry.register(self.gaps)
        self._snapshot = snapshot
        self._collector = DaemonCollector(info)
        self.registry.register(self._collector)
        ProcessCollector(registry=self.registry)
        ProcessCollector("hearth_executor", self._executor_pid, registry=self.registry)

    async def expose(self, form: Form = "text/plain") -> Exposition:
        """The page as it is now."""
        self._collector.snapshot = await self._snapshot()
        encode, content_type = choose_encoder(form)
        return Exposition(content_type, encode(self.registry))

    def _executor_pid(self) -> int:
        """No process has the number 0, which the library leaves out."""
        snapshot = self._collector.snapshot
        return (snapshot.executor_pid if snapshot else None) or 0
