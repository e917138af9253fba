"""Times of GPU contenders turned into the figures that `bench decode --device cuda` reports."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

import msgspec
from msgspec import structs

from hearth.bench.decode.cases import ENGINES, SHORT_CONTEXT, DType, GPUCase, GPUEngine, gguf_type

SETTLE = 2
"""Steps of a round that are not counted: the first finds its token ready, and reads it at once."""


class GPUFigures(msgspec.Struct, kw_only=True):
    """One engine at one case; ratios above 1 mean that Hearth is ahead, None is not measured.

    `step_ms` is the wall time of a decode step of the whole batch, tokens read by the host;
    `context` the tokens of each row in the middle of the steps.
    `host_us` is that of a step whose GPU work is done when it is asked for: time in Python alone.
    `bandwidth_share` is `step_bytes` over the step's time over the best read bandwidth of the
    same run. `raw_ms` is a launch of the engine's step with nothing around it, back to back;
    `raw_alone_ms` likewise, when the peers are gone, and `actor_over_raw` the time of a step
    through a whole daemon over that. `llama_cpp_type` is what the weights of llama.cpp are stored
    as. `tokens_vs_batch_1` is the ratio of tokens a second to those of batch 1, `over_short` that
    of the step's time to the same with a short context.
    """

    step_ms: float
    context: int
    host_us: float | None
    bandwidth_share: float | None
    vs_transformers: float | None
    vs_torch_compile: float | None
    vs_llama_cpp: float | None
    vs_ort_cuda: float | None
    tokens_per_s: float
    tokens_vs_batch_1: float | None = None
    over_short: float | None = None
    raw_ms: float
    raw_alone_ms: float | None
    actor_ms: float | None
    actor_over_raw: float | None
    transformers_ms: float | None
    torch_compile_ms: float | None
    llama_cpp_ms: float | None
    llama_cpp_type: str
    ort_cuda_ms: float | None
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
    return times.floor_bytes / min(times.floor)


def gpu_figures(
    engine: GPUEngine,
    times: GPUTimes,
    *,
    case: GPUCase,
    step_bytes: float,
    dtype: DType,
    notes: Sequence[str],
) -> GPUFigures:
    """The figures of one engine among the contenders."""
    step = step_seconds(times.rounds[engine])
    stored = gguf_type(engine, dtype)
    beside = {
        "transformers": "transformers",
        "torch_compile": "torch_compile",
        "llama_cpp": llama_name(stored),
        "ort_cuda": "ort-cuda",
    }
    peers = {
        key: step_seconds(times.rounds[name]) if name in times.rounds and name != engine else None
        for key, name in beside.items()
    }
    ratios = {f"vs_{key}": peer / step if peer else None for key, peer in peers.items()}
    durations = {f"{key}_ms": 1000 * peer if peer else None for key, peer in peers.items()}
    bandwidth = read_bandwidth(times)
    actor, alone = times.actor.get(engine), times.alone.get(engine)
    return GPUFigures(
        step_ms=1000 * step,
        context=case.context,
        host_us=1e6 * median(times.host[engine]) if engine in times.host else None,
        bandwidth_share=step_bytes / step / bandwidth if bandwidth else None,
        tokens_per_s=case.batch / step,
        raw_ms=1000 * times.raw[engine],
        raw_alone_ms=1000 * alone if alone else None,
        actor_ms=1000 * actor if actor else None,
        actor_over_raw=actor / alone if actor and alone else None,
        llama_cpp_type=stored if peers["llama_cpp"] else "",
        step_bytes=step_bytes,
        read_gb_per_s=bandwidth / 1e9 if bandwidth else None,
        dtype=dtype,
        notes=list(notes),
        **ratios,
        **durations,
    )


def llama_name(stored: str) -> str:
    """The contender that is llama.cpp with weights stored so."""
    return f"llama_cpp {stored}"


def compare_cases(figures: Mapping[str, GPUFigures], cases: Iterable[GPUCase]) -> None:
    """Fill in the ratios to the same engine and model at batch 1, and with a short context."""
    for case in cases:
        one = structs.replace(case, batch=1)
        short = structs.replace(case, context=SHORT_CONTEXT)
        for engine in ENGINES:
            found = figures.get(f"{engine}/{case.name}")
            if found is None:
                continue
            if one != case and (other := figures.get(f"{engine}/{one.name}")):
                found.tokens_vs_batch_1 = found.tokens_per_s / other.tokens_per_s
            if short != case and (other := figures.get(f"{engine}/{short.name}")):
                found.over_short = found.step_ms / other.step_ms


def share_best_read(figures: Mapping[str, GPUFigures]) -> None:
    """Compare every case with the best read bandwidth of the run.

    How fast a library reads depends on the shape of the buffer; the card is the same for all.
    """
    best = max((found.read_gb_per_s or 0.0 for found in figures.values()), default=0.0)
    for found in figures.values() if best else ():
        found.read_gb_per_s = best
        found.bandwidth_share = found.step_bytes / (found.step_ms / 1000) / (best * 1e9)
