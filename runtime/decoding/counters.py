"""What a runtime tells of itself."""

from collections.abc import Mapping

from runtime.decoding.speculative import SpeculativeStrategy
from runtime.device.device import Device
from runtime.errors import HearthError
from runtime.executor.graph_cache import GraphCounters
from runtime.prefix.metrics import PrefixMetrics
from runtime.prefix.prefix_cache import PrefixCache
from runtime.steps.engine_runner import LLMEngineRunner, PromptGraphs
from runtime.steps.image_merge import MultimodalMetrics


class RuntimeCounters:
    """The counters of a runtime's parts."""

    _runner: LLMEngineRunner
    _device: Device
    _speculation: SpeculativeStrategy | None
    _prefix: PrefixCache | None

    @property
    def counters(self) -> GraphCounters:
        """Graphs captured, hit, missed and failed so far."""
        return self._runner.executor.counters

    @property
    def graphs(self) -> Mapping[str, GraphCounters]:
        """The counters of the base, and of the draft where there is one."""
        if self._speculation is None:
            return {"base": self.counters}
        return {"base": self.counters, "draft": self._speculation.proposer.counters}

    @property
    def prefix_metrics(self) -> PrefixMetrics | None:
        """What the prefix cache has done; None where there is none."""
        return None if self._prefix is None else self._prefix.metrics

    def take_failures(self) -> list[HearthError]:
        """What went wrong without harm to any row, since this was asked the last time."""
        return [] if self._prefix is None else self._prefix.take_failures()

    @property
    def device_free(self) -> int | None:
        """Free bytes of the device's own memory; None where it has none of its own."""
        return self._device.free_memory()

    @property
    def prompt_graphs(self) -> PromptGraphs:
        """Those of prefill steps, which `counters` counts too."""
        return self._runner.prompt_graphs

    def get_multimodal_metrics(self) -> MultimodalMetrics:
        """What images took so far; all zero for an engine that takes none."""
        return self._runner.multimodal_metrics
