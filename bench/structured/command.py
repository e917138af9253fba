"""`hearth bench structured`: what grammars cost, and whether replies follow them."""

import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median, quantiles

import click
import msgspec

from hearth.bench.batches import run_batch
from hearth.bench.one_row import choose_kind, device_option, export_options
from hearth.bench.random_model import QUICK_SHAPE, SHAPE_06B, Shape, write_random_model
from hearth.bench.report import Record, note, print_fields, publish, record_option
from hearth.bench.structured.schemas import Schema, is_valid, schemas
from hearth.bench.toy_daemon import engine_option
from hearth.daemon.cli.errors import FAILED
from hearth.daemon.cli.options import json_option
from hearth.runtime.engine_folder import TOKENIZER_FILE
from hearth.runtime.export import export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.grammar import GrammarCompiler, json_term
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.text.tokenizer import Tokenizer

VOCABULARY = 151_936
ROWS = 8
"""Rows of a batch."""
_CAPACITY, _PROMPT = 512, (5, 6, 7, 8)
_REPLY_TOKENS, _STEP_TOKENS = 96, 33
_MOST_COST = 1.05
_SIGNS = '{}[]":,'


class StructuredFigures(msgspec.Struct, kw_only=True):
    """CPU times of masks and compilations; `step_cost` is a step of 8 rows with masks over one
    of 8 without. `valid_share` is of `replies`, those that came to their end.
    """  # noqa: D205 - one thought

    mask_us_p50: float
    mask_us_p99: float
    tool_mask_us_p99: float
    compile_ms_p50: float
    compile_ms_p99: float
    step_cost: float
    step_ms: float
    valid_share: float
    replies: int
    draws: int
    schemas: int
    vocabulary: int


def pieces(count: int) -> Iterator[str]:
    """Yield so many distinct pieces of text, as a vocabulary has them: numbers, signs, words."""
    syllables = ["".join(one) for one in itertools.product("bcdfghklmnprstvw", "aeiou")]
    # The first syllable changes fastest, so that words begin in all ways.
    words = (
        begin + "".join(reversed(word)) + end
        for length in (1, 2, 3)
        for word in itertools.product(syllables, repeat=length)
        for begin, end in itertools.product(("", " "), ("", "s", "n"))
    )
    numbers = (str(number) for number in range(10, 1000))
    signs = ("".join(one) for size in (2, 3) for one in itertools.product(_SIGNS, repeat=size))
    return itertools.islice(itertools.chain(numbers, signs, words), count)


def write_vocabulary(folder: Path) -> None:
    """Put pieces of text in the place of the words of a random model's tokenizer."""
    path = folder / TOKENIZER_FILE
    tokenizer = json.loads(path.read_text())
    known = tokenizer["model"]["vocab"]
    first = min(number for word, number in known.items() if word.startswith("word"))
    kept = {word: number for word, number in known.items() if number < first}
    named = (piece.replace(" ", "\u0120") for piece in pieces(len(known) - first))
    tokenizer["model"]["vocab"] = kept | {one: first + at for at, one in enumerate(named)}
    path.write_text(json.dumps(tokenizer))


@contextmanager
def _given_or_random(engine: Path | None, device: str, vocabulary: int) -> Iterator[Path]:
    """The engine folder that was given, or one of random weights for as long as it is needed."""
    if engine is not None:
        yield engine
        return
    shape: Shape = SHAPE_06B if device == "cuda" else QUICK_SHAPE
    options = export_options(choose_kind(device, None, 0, ""), "", _CAPACITY)
    options = msgspec.structs.replace(options, max_batch=ROWS)
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as folder:
        source, target = Path(folder) / "model", Path(folder) / "engine"
        shape = msgspec.structs.replace(shape, vocabulary=vocabulary)
        write_random_model(source, shape, pooled=True)
        write_vocabulary(source)
        export_model(source, target, options)
        yield target


def _row(grammar: str, tokens: int, seed: int, temperature: float) -> RowRequest:
    options = RequestOptions(
        max_tokens=tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=not grammar,
        grammar=grammar,
        cache="bypass",
    )
    return RowRequest(token_ids=list(_PROMPT), prompt_length=len(_PROMPT), options=options)


class StructuredSession:
    """Measures one runtime, whose engine is in `folder`."""

    def __init__(self, runtime: LLMInferenceRuntime, folder: Path) -> None:
        config = runtime.config
        self._runtime, self._tokenizer = runtime, Tokenizer.open(folder)
        self._vocabulary, self._ends = config.output_vocab_size, config.eos_token_ids
        self._compiler = GrammarCompiler(folder / TOKENIZER_FILE, self._vocabulary, self._ends)
        self._schemas = schemas()
        runtime.capture([ROWS])

    def figures(self, draws: int, steps: int) -> StructuredFigures:
        """Figures of so many replies, and of so many turns of steps with and without masks."""
        with closing(self._compiler):
            compiling = self._compile_s()
            replies = self._replies(draws)
            masks = {name: self._mask_s(name, found) for name, found in replies.items()}
            cost, step_s = self._step_cost(steps)
        ended = [
            (ids[:-1], self._schemas[name])
            for name, found in replies.items()
            for ids in found
            if ids[-1] in self._ends
        ]
        valid = [is_valid(self._tokenizer.decode(ids), schema) for ids, schema in ended]
        every = [one for found in masks.values() for one in found]
        tools = [one for name, found in masks.items() if name.startswith("tool") for one in found]
        return StructuredFigures(
            mask_us_p50=1e6 * median(every),
            mask_us_p99=1e6 * quantiles(every, n=100)[-1],
            tool_mask_us_p99=1e6 * quantiles(tools, n=100)[-1],
            compile_ms_p50=1e3 * median(compiling),
            compile_ms_p99=1e3 * quantiles(compiling, n=100)[-1],
            step_cost=cost,
            step_ms=1e3 * step_s,
            valid_share=sum(valid) / len(valid) if valid else 0.0,
            replies=len(valid),
            draws=draws,
            schemas=len(self._schemas),
            vocabulary=self._vocabulary,
        )

    def _compile_s(self) -> list[float]:
        """CPU seconds of each compilation, with its thread's; the tokenizer is made before."""
        self._compiler.matcher('start: "ready"')
        return [self._timed_compile(schema) for schema in self._schemas.values()]

    def _timed_compile(self, schema: Schema) -> float:
        started = time.process_time()
        self._compiler.matcher(_grammar(schema))
        return time.process_time() - started

    def _replies(self, draws: int) -> dict[str, list[list[int]]]:
        """Token ids of random replies at temperature 1.5, by schema in turn, 8 rows at a time."""
        names = list(itertools.islice(itertools.cycle(self._schemas), draws))
        found: dict[str, list[list[int]]] = {name: [] for name in self._schemas}
        for first in range(0, draws, ROWS):
            chosen = names[first : first + ROWS]
            rows = [
                _row(_grammar(self._schemas[name]), _REPLY_TOKENS, first + place, 1.5)
                for place, name in enumerate(chosen)
            ]
            for name, ids in zip(chosen, run_batch(self._runtime, rows).token_ids, strict=True):
                found[name].append(ids)
            if first % 1000 < ROWS:
                note(f"{first + len(chosen)} of {draws} replies")
        return found

    def _mask_s(self, name: str, replies: Sequence[Sequence[int]]) -> list[float]:
        """CPU seconds of the mask before each token of replies."""
        found = []
        for ids in replies:
            matcher = self._compiler.matcher(_grammar(self._schemas[name]))
            for token in ids:
                started = time.thread_time()
                matcher.mask()
                found.append(time.thread_time() - started)
                matcher.accept(token)
        return found

    def _step_cost(self, turns: int) -> tuple[float, float]:
        """A greedy step with masks over one without, and the seconds of that; medians."""
        tools = [one for name, one in self._schemas.items() if name.startswith("tool")]
        # Lists so long that no row ends.
        endless = [
            {"type": "array", "items": one, "minItems": _STEP_TOKENS} for one in tools[:ROWS]
        ]
        held = [_row(_grammar(one), _STEP_TOKENS, 0, 0.0) for one in endless]
        free = [_row("", _STEP_TOKENS, 0, 0.0)] * ROWS
        times: list[tuple[float, float]] = []
        for turn in range(turns + 1):
            pair = {kind: self._step_s(rows) for kind, rows in self._order(turn, held, free)}
            if turn:
                times.append((pair["held"], pair["free"]))
        return median(one / other for one, other in times), median(one for _, one in times)

    def _order(
        self, turn: int, held: list[RowRequest], free: list[RowRequest]
    ) -> list[tuple[str, list[RowRequest]]]:
        # Whoever comes first in a turn finds other things in the caches.
        both = [("held", held), ("free", free)]
        return both[::-1] if turn % 2 else both

    def _step_s(self, rows: list[RowRequest]) -> float:
        steps = run_batch(self._runtime, rows).steps
        return median(one.seconds for one in steps if one.kind == "decode" and one.rows == ROWS)


def _grammar(schema: Schema) -> str:
    return f"start: {json_term(schema)}"


@click.command()
@device_option
@engine_option("random weights (of 0.6B on a GPU, of few layers on the CPU)")
@click.option("--draws", type=click.IntRange(ROWS), default=10_000, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=9, show_default=True)
@click.option("--vocabulary", type=click.IntRange(512), default=VOCABULARY, show_default=True)
@record_option
@json_option
def structured(
    *,
    device: str,
    engine: Path | None,
    draws: int,
    turns: int,
    vocabulary: int,
    record: Record,
    as_json: bool,
) -> int:
    """Masks and compilations of schemas of many kinds, and random replies that follow them.

    Replies are drawn at temperature 1.5, 8 rows at a time. The exit code is 1 when one is not
    valid, or when on a GPU a step of 8 rows with masks takes more than 1.05 times one without.
    """
    with _given_or_random(engine, device, vocabulary) as folder:
        asked = RuntimeOptions(max_batch=ROWS, capacity=_CAPACITY, verify=False)
        with closing(LLMInferenceRuntime.open(folder, asked)) as runtime:
            found = StructuredSession(runtime, folder).figures(draws, turns)
    publish(found, lambda: print_fields("Structured output", found), as_json=as_json)
    record.keep({f"structured/{device}": found})
    slow = device == "cuda" and found.step_cost > _MOST_COST
    if slow:
        note(f"missed: step_cost is {found.step_cost:.4g}, at most {_MOST_COST:g}")
    return FAILED if slow or found.valid_share < 1 else 0
