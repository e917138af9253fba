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

    batches: int
    captures: int
    prefill_steps: int
    decode_steps: int
    hits: int
    misses: int
    fallbacks: int
    hit_rate: float
    evictions: int
    cancels: int
    padded: int
    batch_sizes: list[int]


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
        self._prefill_steps = self._cancels = self._evictions = self._padded = 0
        self._sizes: set[int] = set()

    def run(self, batches: int, progress: Callable[[int, int], None]) -> GraphFigures:
        """Capture as the executor does, then run `batches`; `progress` gets (done, total)."""
        runtime = self._runtime
        runtime.capture(range(1, runtime.max_batch + 1))
        before = msgspec.structs.replace(runtime.counters)
        for number in range(batches):
            self._batch()
            progress(number + 1, batches)
        now = runtime.counters
        hits, misses = now.hits - before.hits, now.misses - before.misses
        fallbacks = now.fallbacks - before.fallbacks
        decode_steps = hits + misses + fallbacks - self._prefill_steps
        return GraphFigures(
            batches=batches,
            captures=now.captures,
            prefill_steps=self._prefill_steps,
            decode_steps=decode_steps,
            hits=hits,
            misses=misses - self._prefill_steps,
            fallbacks=fallbacks,
            hit_rate=hits / decode_steps if decode_steps else 0.0,
            evictions=self._evictions,
            cancels=self._cancels,
            padded=self._padded,
            batch_sizes=sorted(self._sizes),
        )

    def _batch(self) -> None:
        runtime = self._runtime
        rows = int(self._rng.integers(1, runtime.max_batch + 1))
        runtime.admit([self._row() for _ in range(rows)])
        live, before = list(range(rows)), rows
        while runtime.active:
            self._evictions += len(live) < before
            before = len(live)
            step = runtime.step()
            if step.kind == "prefill":
                self._prefill_steps += 1
            else:
                self._sizes.add(before)
                self._padded += before not in self._graphs
            for token in step.tokens:
                if token.finish is not None or token.error is not None:
                    live.remove(token.row)
            if live and self._rng.random() < _CANCEL_SHARE:
                runtime.leave(live.pop(int(self._rng.integers(len(live)))))
                self._cancels += 1
        runtime.release()

    def _row(self) -> RowRequest:
        ids = self._rng.integers(3, self._runtime.config.vocab_size, self._rng.integers(*_PROMPT))
        answer = int(self._rng.integers(*_ANSWER))
        (row,) = rows_of([ids.tolist()], RequestOptions(max_tokens=answer, ignore_eos=True))
        return row
