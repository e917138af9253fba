"""`python -m tools.graphs`: decode steps that captured graphs serve, while rows come and go."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import click
import msgspec
import numpy as np

from hearth.bench.batches import rows_of
from hearth.bench.report import Record, judged, print_fields, publish, record_option
from hearth.bench.toy_daemon import engine_option, given_or_toy
from hearth.daemon.cli.console import progress_bar
from hearth.daemon.cli.errors import run_and_exit
from hearth.daemon.cli.options import json_option
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.generation.step_times import StageMetrics
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.runner.engine_runner import PromptGraphs
from hearth.runtime.tensors.profiles import decode_batches

HIT_RATE_AIM = 0.99
_CANCEL_SHARE = 0.02
_LOAD = 0.8
"""Rows that come in a step, of those that a full batch can end."""
_PROMPT = (4, 48)
_ANSWER = (4, 96)


class GraphFigures(msgspec.Struct, kw_only=True):
    """Steps by kind and result; `prefill_hits` are chunks of prompt from a graph.

    `joins` and `leaves` count the rows that came and went while others ran on, `verify_steps` the
    decode steps that verified trees. `padded` are the decode steps that ran with more rows than
    gave tokens. `hit_rate` is the share of decode steps from a graph. `host_ms` is the mean time
    in which the host queues a step, `ms` its own. `prompt_captures` took `prompt_capture_mb`
    megabytes of 10^6 bytes of the device.
    """

    requests: int = 0
    captures: int = 0
    prompt_captures: int = 0
    prompt_capture_s: float = 0.0
    prompt_capture_mb: float = 0.0
    prefill_steps: int = 0
    prefill_hits: int = 0
    prefill_ms: float = 0.0
    prefill_host_ms: float = 0.0
    decode_ms: float = 0.0
    decode_host_ms: float = 0.0
    decode_steps: int = 0
    verify_steps: int = 0
    hits: int = 0
    misses: int = 0
    fallbacks: int = 0
    hit_rate: float = 0.0
    joins: int = 0
    leaves: int = 0
    cancels: int = 0
    padded: int = 0
    batch_sizes: list[int] = []


@click.command()
@click.option("--requests", type=click.IntRange(1), default=250, show_default=True)
@click.option("--speculation", is_flag=True, help="Speculate, as a daemon does by itself.")
@engine_option("a toy")
@record_option
@json_option
def graphs(
    requests: int, engine: Path | None, record: Record, *, speculation: bool, as_json: bool
) -> int:
    """Count the decode steps that captured graphs serve, while rows come and go at random.

    The exit code is 1 when they are fewer than 99%.
    """
    method: Literal["auto", "off"] = "auto" if speculation else "off"
    options = RuntimeOptions(verify=False, speculation=SpeculationOptions(method=method))
    with (
        given_or_toy(engine) as folder,
        closing(LLMInferenceRuntime.open(folder, options)) as runtime,
        progress_bar() as progress,
    ):
        run = GraphRun(runtime, decode_batches(runtime.config))
        found = run.run(requests, lambda done, total: progress("requests", done, total))
    title = "Decode steps and captured graphs"
    publish(found, lambda: print_fields(title, found), as_json=as_json)
    record.keep({"graphs/speculation" if speculation else "graphs": found})
    few = f"fewer than {HIT_RATE_AIM:.0%} of the decode steps came from a graph"
    return judged([few] if found.hit_rate < HIT_RATE_AIM else [])


class GraphRun:
    """Poisson arrivals on a runtime: prompts and answers of all lengths, some rows cancelled."""

    def __init__(self, runtime: LLMInferenceRuntime, graphs: Sequence[int], seed: int = 0) -> None:
        self._runtime = runtime
        self._graphs = frozenset(graphs)
        self._rng = np.random.default_rng(seed)
        self._live: set[int] = set()

    def run(self, requests: int, progress: Callable[[int, int], None]) -> GraphFigures:
        """Capture as the executor does, then serve `requests`; `progress` gets (done, total)."""
        runtime, found = self._runtime, GraphFigures(requests=requests)
        runtime.capture(range(1, runtime.max_batch + 1))
        before = msgspec.structs.replace(runtime.counters)
        prompts = msgspec.structs.replace(runtime.prompt_graphs)
        rate = _LOAD * runtime.max_batch / (sum(_ANSWER) / 2)
        coming, waiting = requests, 0
        while coming or waiting or self._live:
            come = min(coming, int(self._rng.poisson(rate)))
            coming, waiting = coming - come, waiting + come
            waiting -= self._place(min(waiting, runtime.free), found)
            if self._live:
                self._step(found)
            progress(requests - coming - waiting - len(self._live), requests)
        now = runtime.counters
        found.captures = now.captures
        self._take_prompts(found, prompts)
        found.hits = now.hits - before.hits - found.prefill_hits
        found.fallbacks = now.fallbacks - before.fallbacks
        found.misses = now.misses - before.misses - (found.prefill_steps - found.prefill_hits)
        found.decode_steps = found.hits + found.misses + found.fallbacks
        found.hit_rate = found.hits / found.decode_steps if found.decode_steps else 0.0
        found.batch_sizes = sorted(set(found.batch_sizes))
        return found

    def _take_prompts(self, found: GraphFigures, before: PromptGraphs) -> None:
        """Record the results of chunks, including those that no caller waited for."""
        runtime, now = self._runtime, self._runtime.prompt_graphs
        found.prompt_captures, found.prompt_capture_s = now.captures, now.seconds
        found.prompt_capture_mb = now.bytes / 1e6
        found.prefill_hits = now.hits - before.hits
        found.prefill_steps = found.prefill_hits + now.misses - before.misses
        found.prefill_ms, found.prefill_host_ms = _mean_ms(runtime.prefill_metrics)
        found.decode_ms, found.decode_host_ms = _mean_ms(runtime.generation_metrics)

    def _place(self, count: int, found: GraphFigures) -> int:
        if count:
            found.joins += count if self._live else 0
            self._live.update(self._runtime.admit([self._row() for _ in range(count)]))
        return count

    def _step(self, found: GraphFigures) -> None:
        step = self._runtime.step()
        if step.kind != "prefill":
            rows = len({token.row for token in step.tokens})
            found.batch_sizes.append(rows)
            found.padded += rows not in self._graphs
            found.verify_steps += step.kind == "verify"
        gone = {one.row for one in step.tokens if one.finish is not None or one.error is not None}
        if self._live - gone and self._rng.random() < _CANCEL_SHARE:
            gone.add(int(self._rng.choice(sorted(self._live - gone))))
            found.cancels += 1
        for row in gone:
            # One that has ended is gone already.
            self._runtime.leave(row)
        self._live -= gone
        found.leaves += len(gone) if self._live else 0

    def _row(self) -> RowRequest:
        ids = self._rng.integers(3, self._runtime.config.vocab_size, self._rng.integers(*_PROMPT))
        answer = int(self._rng.integers(*_ANSWER))
        (row,) = rows_of([ids.tolist()], RequestOptions(max_tokens=answer, ignore_eos=True))
        return row


def _mean_ms(stage: StageMetrics) -> tuple[float, float]:
    """Milliseconds of a step, and of the host to queue it."""
    a_step = 1000 / max(1, stage.steps)
    return stage.seconds * a_step, stage.host_seconds * a_step


if __name__ == "__main__":
    run_and_exit(lambda: graphs.main(prog_name="python -m tools.graphs", standalone_mode=False))
