"""All metrics of one daemon in a registry of its own."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from hearth.actors.messages import Deltas
from hearth.daemon.observe.metrics.collector import DaemonCollector, DaemonSnapshot
from hearth.daemon.observe.metrics.endpoint import Exposition, Form
from hearth.daemon.observe.metrics.requests import TOKEN_SECONDS, RequestMetrics

_MOST_ROWS = 1024
"""The largest `max_batch`."""


class TokenGaps(Collector):
    """A histogram of the times between two steps that gave a reply tokens; each reply counts.

    A decode step gives tokens to all replies that have begun: to those of the decode step before,
    and to those whose first token came since, in the steps with `placed`. Of the latter as many
    are remembered as can run at once: others were ended before they went on.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(TOKEN_SECONDS) + 1)
        self._sum = 0.0
        self._decoded = 0.0
        self._begun: dict[int, float] = {}

    def step(self, message: Deltas) -> None:
        """Count a step."""
        if message.placed:
            self._begun |= {row.rid: message.ended for row in message.rows if row.finish is None}
            while len(self._begun) > _MOST_ROWS:
                del self._begun[next(iter(self._begun))]
            return
        if not any(row.tokens for row in message.rows):
            # Replies that were cut off, by no step.
            return
        left = len(message.rows)
        if self._begun:
            first = Counter(self._begun[row.rid] for row in message.rows if row.rid in self._begun)
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
