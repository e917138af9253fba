"""Captures the steps of a runtime before it serves."""

from collections.abc import Callable, Sequence
from itertools import product

from runtime.decoding.speculative import SpeculativeStrategy
from runtime.decoding.vanilla import VanillaStrategy
from runtime.errors import HearthError
from runtime.loading import Told
from runtime.steps.engine_runner import LLMEngineRunner
from runtime.tensors.profiles import decode_batches


def capture_steps(
    runner: LLMEngineRunner,
    vanilla: VanillaStrategy,
    speculation: SpeculativeStrategy | None,
    batch_sizes: Sequence[int],
    told: Told,
) -> list[str]:
    """Capture prefill steps, and decode and speculation steps of these batch sizes.

    Tells what is not captured; raises `invalid_value` for a batch that is too large.
    """
    most = runner.get_engine_config().max_supported_batch_size
    if not all(1 <= size <= most for size in batch_sizes):
        raise HearthError("invalid_value", f"a batch has 1 to {most} rows", "batch_sizes")
    told("capturing", 0.0)
    runner.warm_prefill()
    kinds: list[Callable[[Sequence[int]], None]] = [vanilla.capture]
    counters = [runner.executor.counters]
    if speculation is not None:
        kinds.append(speculation.capture)
        counters.append(speculation.proposer.counters)
    batches = decode_batches(runner.get_engine_config())
    sizes = sorted({next(one for one in batches if one >= size) for size in batch_sizes})
    for done, (capture, size) in enumerate(product(kinds, sizes), 1):
        capture([size])
        told("capturing", done / (len(kinds) * len(sizes) + 1))
    runner.capture_prefill_graphs()
    told("capturing", 1.0)
    return [
        f"{one.failed_captures} steps are not captured: {one.failure}"
        for one in counters
        if one.failed_captures
    ]
