"""`hearth bench graphs`: decode steps that captured graphs serve, in a run that disturbs them."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import click
import msgspec
import numpy as np

from bench.batches import rows_of
from bench.report import Record, note, print_fields, publish, record_option
from bench.toy_daemon import engine_option, given_or_toy
from daemon.cli.console import progress_bar
from daemon.cli.errors import FAILED
from daemon.cli.options import json_option
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.options import RuntimeOptions
from runtime.request import RequestOptions, RowRequest
from runtime.tensors.profiles import decode_batches

HIT_RATE_AIM = 0.99
_CANCEL_SHARE = 0.02
_PROMPT = (4, 48)
_ANSWER = (4, 96)


class GraphFigures(msgspec.Struct, kw_only=True):
    """Steps by kind and what became of decode steps; a prefill step has no graph.

    `evictions` counts the times that rows left a batch that went on, `padded` the decode steps
    that ran with more rows than were live. `hit_rate` is the share of decode steps from a graph.
    """

    batches: int = 0
    captures: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    hits: int = 0
    misses: int = 0
    fallbacks: int = 0
    hit_rate: float = 0.0
    evictions: int = 0
    cancels: int = 0
    padded: int = 0
    batch_sizes: list[int] = []


@click.command()
@click.option("--batches", type=click.IntRange(1), default=50, show_default=True)
@engine_option("a toy")
@record_option
@json_option
def graphs(batches: int, engine: Path | None, record: Record, *, as_json: bool) -> int:
    """Count the decode steps that captured graphs serve, with evictions, cancels and padding.

    The exit code is 1 when they are fewer than 99%.
    """
    options = RuntimeOptions(verify=False)
    with (
        given_or_toy(engine) as folder,
        closing(LLMInferenceRuntime.open(folder, options)) as runtime,
        progress_bar() as progress,
    ):
        run = GraphRun(runtime, decode_batches(runtime.config))
        found = run.run(batches, lambda done, total: progress("batches", done, total))
    title = "Decode steps and captured graphs"
    publish(found, lambda: print_fields(title, found), as_json=as_json)
    record.keep({"graphs": found})
    if found.hit_rate < HIT_RATE_AIM:
        note(f"fewer than {HIT_RATE_AIM:.0%} of the decode steps came from a graph")
        return FAILED
    return 0


class GraphRun:
    """Random batches on a runtime: prompts and answers of all lengths, some rows cancelled."""

    def __init__(self, runtime: LLMInferenceRuntime, graphs: Sequence[int], seed: int = 0) -> None:
        self._runtime = runtime
        self._graphs = frozenset(graphs)
        self._rng = np.random.default_rng(seed)

    def run(self, batches: int, progress: Callable[[int, int], None]) -> GraphFigures:
        """Capture as the executor does, then run `batches`; `progress` gets (done, total)."""
        runtime, found = self._runtime, GraphFigures()
        runtime.capture(range(1, runtime.max_batch + 1))
        before = msgspec.structs.replace(runtime.counters)
        for number in range(batches):
            self._batch(found)
            progress(number + 1, batches)
        now = runtime.counters
        found.batches, found.captures = batches, now.captures
        found.hits, found.fallbacks = now.hits - before.hits, now.fallbacks - before.fallbacks
        found.misses = now.misses - before.misses - found.prefill_steps
        found.decode_steps = found.hits + found.misses + found.fallbacks
        found.hit_rate = found.hits / found.decode_steps if found.decode_steps else 0.0
        found.batch_sizes = sorted(set(found.batch_sizes))
        return found

    def _batch(self, found: GraphFigures) -> None:
        runtime = self._runtime
        rows = int(self._rng.integers(1, runtime.max_batch + 1))
        runtime.admit([self._row() for _ in range(rows)])
        live, before = list(range(rows)), rows
        while runtime.active:
            found.evictions += len(live) < before
            before = len(live)
            step = runtime.step()
            if step.kind == "prefill":
                found.prefill_steps += 1
            else:
                found.batch_sizes.append(before)
                found.padded += before not in self._graphs
            for token in step.tokens:
                if token.finish is not None or token.error is not None:
                    live.remove(token.row)
            if live and self._rng.random() < _CANCEL_SHARE:
                runtime.leave(live.pop(int(self._rng.integers(len(live)))))
                found.cancels += 1

    def _row(self) -> RowRequest:
        ids = self._rng.integers(3, self._runtime.config.vocab_size, self._rng.integers(*_PROMPT))
        answer = int(self._rng.integers(*_ANSWER))
        (row,) = rows_of([ids.tolist()], RequestOptions(max_tokens=answer, ignore_eos=True))
        return row
