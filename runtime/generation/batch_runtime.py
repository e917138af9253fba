import time
from collections.abc import Iterable, Mapping, Sequence
from math import inf, prod
from pathlib import Path
from typing import Protocol

import msgspec

from hearth.runtime.batch import DecodingRow, RowState, tokens_to_generate
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import GraphCounters
from hearth.runtime.generation.in_flight import StepKind
from hearth.runtime.generation.step_times import StageMetrics
from hearth.runtime.generation.vision_scheduler import TowerResult, TowerWork
from hearth.runtime.image_processing.positions import row_positions
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics
from hearth.runtime.request import RowRequest, RowRound, RowToken
from hearth.runtime.runner.image_merge import MultimodalMetrics
from hearth.runtime.speculation.policy import EagleGenerationMetrics


def check_row(
    config: LLMEngineRunnerConfig,
    row: RowRequest,
    capacity: int,
    *,
    speculates: bool = False,
    pins: bool = False,
) -> None:
    """Refuse a row that cannot be served to its end; the error names the field.

    `capacity` counts the tokens that a row holds. A runtime `speculates`, and `pins` prompts in a
    prefix cache, or refuses rows that ask for it.
    """
    _check_prompt(config, row)
    if row.images:
        _check_images(config, row)
    generated = len(row.token_ids) - row.prompt_length
    wanted = tokens_to_generate(row, capacity)
    if row.prompt_length >= capacity:
        raise HearthError(
            "capacity_exceeded",
            f"the prompt leaves no room in the {capacity} tokens of a row: shorten it",
            "token_ids",
        )
    if wanted <= generated:
        raise HearthError(
            "invalid_value",
            f"max_tokens is {wanted} and {generated} tokens are generated already: "
            "ask for at least one more",
            "max_tokens",
        )
    needed = row.prompt_length + wanted
    if needed > capacity:
        raise HearthError(
            "capacity_exceeded",
            f"prompt and max_tokens need {needed} tokens, a row holds {capacity}: ask for fewer",
            "max_tokens",
        )
    _check_positions(config, row, needed)
    if row.options.speculation and not speculates:
        what = "this engine runs without speculation: leave it to the daemon"
        raise HearthError("unsupported_option", what, "speculation")
    if row.options.cache == "pin" and not pins:
        raise HearthError("unsupported_option", "there is no prefix cache to pin to", "cache")


def shared_adapter(rows: Sequence[RowRequest], running: str | None) -> str:
    """Return the adapter of all rows and of those that run, if any; raises `invalid_value`."""
    adapters = {row.options.adapter for row in rows}
    if running is not None:
        adapters.add(running)
    if len(adapters) > 1:
        what = "rows that run together share an adapter, or have none"
        raise HearthError("invalid_value", what, "adapter")
    return adapters.pop()


def _check_prompt(config: LLMEngineRunnerConfig, row: RowRequest) -> None:
    if not row.token_ids or row.prompt_length < 1:
        raise HearthError("prompt_empty", "the prompt has no tokens", "token_ids")
    if row.prompt_length > len(row.token_ids):
        raise HearthError(
            "invalid_value",
            f"prompt_length is {row.prompt_length}, there are {len(row.token_ids)} tokens",
            "prompt_length",
        )
    if row.prompt_length > config.max_supported_input_length:
        raise HearthError(
            "prompt_too_long",
            f"the prompt has {row.prompt_length} tokens, this engine takes "
            f"{config.max_supported_input_length}",
            "token_ids",
        )
    low, high = min(row.token_ids), max(row.token_ids)
    if low < 0 or high >= config.vocab_size:
        raise HearthError(
            "invalid_value",
            f"token {low if low < 0 else high} is not in the vocabulary of {config.vocab_size}",
            "token_ids",
        )


def _check_images(config: LLMEngineRunnerConfig, row: RowRequest) -> None:
    if not config.image_token_id:
        raise HearthError("unsupported_option", "this model takes no images", "images")
    end = 0
    for index, image in enumerate(row.images):
        for span in image.spans:
            within = end <= span.start and span.start + span.length <= row.prompt_length
            there = span.first >= 0 and span.first + span.length <= image.tokens
            grid = (prod(span.grid) == span.length and min(span.grid) > 0) or not any(span.grid)
            apart = 0.0 <= span.interval < inf
            if not (span.length > 0 and within and there and grid and apart):
                raise HearthError(
                    "invalid_value",
                    f"images[{index}] stands at tokens {span.start} to "
                    f"{span.start + span.length - 1}, which is not in order, not in the prompt "
                    f"of {row.prompt_length} or not what it has",
                    f"images[{index}]",
                )
            end = span.start + span.length


def _check_positions(config: LLMEngineRunnerConfig, row: RowRequest, needed: int) -> None:
    """Refuse a row with positions beyond the engine's; videos may count faster than tokens."""
    if not (row.images and config.use_context_dependent_rope):
        return
    spans = [span for image in row.images for span in image.spans]
    prompt, delta = row_positions(row.prompt_length, spans)
    positions = max(needed + delta, 1 + int(prompt.max(initial=0)))
    if positions > config.max_kv_cache_capacity:
        ends = [
            max((prompt[:, one.start : one.start + one.length].max() for one in spans), default=0)
            for spans in (image.spans for image in row.images)
        ]
        raise HearthError(
            "capacity_exceeded",
            f"images put tokens at positions up to {positions}, this engine has "
            f"{config.max_kv_cache_capacity}: take fewer frames of a video, or closer ones",
            f"images[{ends.index(max(ends))}]",
        )


class StepResult(msgspec.Struct):
    """Result of one step; times in seconds of the monotonic clock.

    A row may have several tokens, in their order. `rounds` are the rows that speculated. `failure`
    is the error of a prefill: its rows end with it, and the others go on. `pictures` are those that
    the vision encoder finished. With the first token of a row `slot_times` has the time at which it
    was admitted, and `cached` the number of its tokens from the prefix cache, if there are any.
    """

    kind: StepKind
    tokens: list[RowToken]
    started: float
    ended: float
    rounds: list[RowRound] = []
    failure: HearthError | None = None
    pictures: list[TowerResult] = []
    slot_times: dict[int, float] = {}
    cached: dict[int, int] = {}


class Grammars(Protocol):
    """Compiler of grammars, by their text."""

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable when a grammar is compiled, until the next `ready`."""

    def ready(self, grammar: str) -> bool:
        """Return False while a grammar is being compiled; raises where it cannot be."""

    def keep_only(self, wanted: Iterable[str]) -> None:
        """Drop the grammars that wait to be compiled, but for those that are `wanted` still."""


class BatchRuntime(Protocol):
    """Interface of a runtime to its loop: admit rows, step while any is active, let rows leave.

    Rows have the numbers that `admit` got, or are counted from 0, and anew when none is active.
    """

    memory: dict[str, int]
    """Bytes by part that the engines need with all rows full, as `hearth check` prints them."""

    @property
    def prefill_metrics(self) -> StageMetrics:
        """Metrics of prefill chunks."""

    @property
    def generation_metrics(self) -> StageMetrics:
        """Metrics of decode and verify steps."""

    @property
    def speculation_metrics(self) -> EagleGenerationMetrics:
        """Speculation metrics; all zero without speculation."""

    @property
    def adapter(self) -> str:
        """The adapter that all rows share; "" for none."""

    def load_adapter(self, name: str, source: Path) -> None:
        """Load an adapter from a folder; raises naming what is at fault."""

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no row runs with; raises `adapter_unknown`."""

    @property
    def graphs(self) -> Mapping[str, GraphCounters]:
        """Counters of captured graphs and steps, of the base and of a draft."""

    @property
    def prefix_metrics(self) -> PrefixMetrics | None:
        """Prefix cache metrics; None without a prefix cache."""

    def get_multimodal_metrics(self) -> MultimodalMetrics:
        """Return image metrics; all zero for an engine without images."""

    def take_failures(self) -> list[HearthError]:
        """Take the errors since the last call that harmed no row."""

    @property
    def device_free(self) -> int | None:
        """Free bytes of the device's own memory; None where it has none of its own."""

    @property
    def active(self) -> bool:
        """True if a row goes on, or a picture waits for the vision encoder."""

    @property
    def free(self) -> int:
        """Number of rows that can be admitted before the next step."""

    @property
    def queue_by(self) -> float:
        """Monotonic time at which to queue the next step; in the past for at once.

        Rows that are admitted before then wait for no further step of the others.
        """

    def check(self, row: RowRequest) -> None:
        """Refuse a row that `admit` would refuse; the error names the field."""

    @property
    def grammars(self) -> Grammars | None:
        """Compiler of the grammars of rows; None for rows without."""

    def admit(self, rows: Sequence[RowRequest], numbers: Sequence[int] | None = None) -> list[int]:
        """Take rows, all or none, and give their numbers; raises naming the field at fault."""

    def run_tower(self, work: TowerWork) -> None:
        """Queue a picture for the vision encoder; its result comes with that of a step.

        Raises `image_too_large`, and `internal` where there is no tower.
        """

    def step(self) -> StepResult:
        """Run one prefill chunk, one decode step, one round of speculation or a call of a tower."""

    def leave(self, row: int) -> None:
        """Let a row leave before the next step; nothing more is reported for it."""

    def unpin(self, client: int) -> None:
        """Release the pages that a client's rows have pinned in the prefix cache."""

    def release(self, row: int, *, paid: bool = False) -> list[int] | None:
        """Remove a live row and return its tokens beyond the prompt; None if it has ended.

        With `paid` also None until it has decoded for as long as its prefill took.
        """


def failed_chunk(rows: Sequence[DecodingRow], started: float, error: Exception) -> StepResult:
    """Build the result of a failed chunk, which ends its rows alone; raises `device_lost` again."""
    if isinstance(error, MemoryError):
        error = HearthError(
            "out_of_memory", "no memory for a chunk of prompts: lower capacity or max_batch"
        )
    if not isinstance(error, HearthError) or error.code == "device_lost":
        raise error
    tokens = [row.fail(error.code) for row in rows if row.state is RowState.LIVE]
    return StepResult("prefill", tokens, started, time.monotonic(), failure=error)


def reused(rows: Sequence[DecodingRow], tokens: Sequence[RowToken]) -> dict[int, int]:
    """Number of tokens from the prefix cache, by row number, of rows that begin."""
    begun = {token.row for token in tokens if token.error is None}
    return {row.number: row.reused for row in rows if row.reused and row.number in begun}
