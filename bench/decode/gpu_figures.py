"""Times of GPU contenders turned into the figures that `bench decode --device cuda` reports."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import msgspec

from bench.contenders.floor import gpu_repeats

SETTLE = 2
"""Steps of a round that are not counted: the first finds its token ready, and reads it at once."""


class GPUFigures(msgspec.Struct, kw_only=True):
    """One engine at one case; ratios above 1 mean that Hearth is ahead, None is not measured.

    `step_ms` is the wall time of a decode step of the whole batch, tokens read by the host.
    `host_us` is that of a step whose GPU work is done when it is asked for: time in Python alone.
    `bandwidth_share` is `step_bytes` over the step's time over the best read bandwidth of the
    same run. `raw_ms` is a launch of the engine's step with nothing around it, back to back;
    `raw_alone_ms` likewise, when the peers are gone, and `actor_over_raw` the time of a step
    through a whole daemon over that. `tokens_vs_batch_1` is the ratio of tokens a second to those
    of batch 1.
    """

    step_ms: float
    host_us: float | None
    bandwidth_share: float | None
    vs_transformers: float | None
    vs_torch_compile: float | None
    tokens_per_s: float
    tokens_vs_batch_1: float | None = None
    raw_ms: float
    raw_alone_ms: float | None
    actor_ms: float | None
    actor_over_raw: float | None
    transformers_ms: float | None
    torch_compile_ms: float | None
    step_bytes: float
    read_gb_per_s: float | None
    dtype: str
    notes: list[str] = []


class GPUTimes(msgspec.Struct, kw_only=True):
    """Seconds by contender: `rounds` of steps, passes of the floor; an engine's other times.

    `alone` and `actor` are of an engine that has the machine for itself.
    """

    rounds: dict[str, list[list[float]]]
    floor: list[float] = []
    floor_bytes: int = 0
    host: dict[str, list[float]] = {}
    raw: dict[str, float] = {}
    alone: dict[str, float] = {}
    actor: dict[str, float] = {}


def step_seconds(rounds: Sequence[Sequence[float]]) -> float:
    """Median over the rounds of the mean step, the first of each round left out."""
    return median(fmean(steps[SETTLE:]) for steps in rounds)


def read_bandwidth(times: GPUTimes) -> float | None:
    """Bytes a second of the fastest pass of the floor."""
    if not times.floor:
        return None
    return times.floor_bytes * gpu_repeats(times.floor_bytes) / min(times.floor)


def gpu_figures(
    engine: str, times: GPUTimes, *, batch: int, step_bytes: float, dtype: str, notes: Sequence[str]
) -> GPUFigures:
    """The figures of one engine among the contenders."""
    step = step_seconds(times.rounds[engine])
    eager, compiled = (
        step_seconds(times.rounds[name]) if name in times.rounds else None
        for name in ("transformers", "torch_compile")
    )
    bandwidth = read_bandwidth(times)
    actor, alone = times.actor.get(engine), times.alone.get(engine)
    return GPUFigures(
        step_ms=1000 * step,
        host_us=1e6 * median(times.host[engine]) if engine in times.host else None,
        bandwidth_share=step_bytes / step / bandwidth if bandwidth else None,
        vs_transformers=eager / step if eager else None,
        vs_torch_compile=compiled / step if compiled else None,
        tokens_per_s=batch / step,
        raw_ms=1000 * times.raw[engine],
        raw_alone_ms=1000 * alone if alone else None,
        actor_ms=1000 * actor if actor else None,
        actor_over_raw=actor / alone if actor and alone else None,
        transformers_ms=1000 * eager if eager else None,
        torch_compile_ms=1000 * compiled if compiled else None,
        step_bytes=step_bytes,
        read_gb_per_s=bandwidth / 1e9 if bandwidth else None,
        dtype=dtype,
        notes=list(notes),
    )


def compare_batches(figures: Mapping[str, GPUFigures]) -> None:
    """Fill in `tokens_vs_batch_1` where the same engine and model were measured at batch 1."""
    for key, found in figures.items():
        stem, _, batch = key.rpartition("/b")
        one = figures.get(f"{stem}/b1")
        if one is not None and batch != "1":
            found.tokens_vs_batch_1 = found.tokens_per_s / one.tokens_per_s


def share_best_read(figures: Mapping[str, GPUFigures]) -> None:
    """Compare every case with the best read bandwidth of the run.

    How fast a library reads depends on the shape of the buffer; the card is the same for all.
    """
    best = max((found.read_gb_per_s or 0.0 for found in figures.values()), default=0.0)
    for found in figures.values() if best else ():
        found.read_gb_per_s = best
        found.bandwidth_share = found.step_bytes / (found.step_ms / 1000) / (best * 1e9)
