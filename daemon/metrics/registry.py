"""All metrics of one daemon in a registry of its own."""

from collections.abc import Awaitable, Callable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from daemon.metrics.collector import DaemonCollector, Look
from daemon.metrics.endpoint import Exposition, Form
from daemon.metrics.gaps import TokenGaps
from daemon.metrics.requests import RequestMetrics


class DaemonMetrics:
    """What is counted, and its page; `look` is asked for the daemon's state for each page."""

    def __init__(self, info: Mapping[str, str], look: Callable[[], Awaitable[Look]]) -> None:
        # The time at which each series began would double their number.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        self.gaps = TokenGaps()
        self.registry.register(self.gaps)
        self._look = look
        self._collector = DaemonCollector(info)
        self.registry.register(self._collector)
        ProcessCollector(registry=self.registry)
        ProcessCollector("hearth_executor", self._executor_pid, registry=self.registry)

    async def expose(self, form: Form = "text/plain") -> Exposition:
        """The page as it is now."""
        self._collector.look = await self._look()
        encode, content_type = choose_encoder(form)
        return Exposition(content_type, encode(self.registry))

    def _executor_pid(self) -> int:
        """No process has the number 0, which the library leaves out."""
        look = self._collector.look
        return (look.executor_pid if look else None) or 0
