"""Rows that begin alike, and what a runtime gave them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hearth.runtime.config import load_config
from hearth.runtime.device.cpu.cpu_device import cpu_instructions
from hearth.runtime.engine_folder import DRAFT_FOLDER
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.images import EmbeddingStore
from hearth.runtime.kv_cache.page_pool import page_bytes
from hearth.runtime.kv_cache.prefix_cache import INT4_EXACT
from hearth.runtime.onnx_runtime import installed_version, reads_native
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest, RowRound, RowToken

TOKENS = 10


class Outcome(msgspec.Struct):
    """Tokens and rounds of rows by number, and of how many tokens each had a prefix."""

    tokens: dict[int, list[RowToken]] = {}
    rounds: dict[int, list[RowRound]] = {}
    cached: dict[int, int] = {}

    def reply(self, row: int = 0) -> list[int]:
        """The tokens of a row."""
        return [token.token_id for token in self.tokens[row]]


def open_pages(
    folder: Path,
    pages: int = 60,
    *,
    embeddings: EmbeddingStore | None = None,
    speculation: SpeculationOptions | None = None,
    **options: Any,
) -> LLMInferenceRuntime:
    """A runtime whose prefix cache has room for so many pages."""
    base = load_config(folder)
    drafts = base.enable_eagle_spec_decode
    draft = load_config(folder / DRAFT_FOLDER) if drafts else None
    chosen = RuntimeOptions(
        threads=1,
        verify=False,
        prefix_cache_bytes=pages * page_bytes(base, draft),
        speculation=speculation or SpeculationOptions(),
        **options,
    )
    return LLMInferenceRuntime.open(folder, chosen, embeddings=embeddings)


needs_native = pytest.mark.skipif(
    not reads_native(installed_version()), reason="this ONNX Runtime reads opset 23 at most"
)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens of a reference model."""
    found: list[int] = np.random.default_rng(seed).integers(3, 288, length).tolist()
    return found


def row(token_ids: Sequence[int], **options: Any) -> RowRequest:
    """A row of a few tokens, with the log probabilities of three."""
    chosen: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 3}
    return RowRequest(
        token_ids=list(token_ids),
        prompt_length=len(token_ids),
        options=RequestOptions(**(chosen | options)),
    )


def run(runtime: LLMInferenceRuntime, *rows: RowRequest, after: int = 0) -> Outcome:
    """Run rows, the others `after` so many steps of the first one; all at once with 0."""
    found, waiting = Outcome(), list(rows)
    numbers = runtime.admit([waiting.pop(0)] if after else waiting)
    waiting = waiting if after else []
    steps = 0
    while runtime.active:
        result = runtime.step()
        steps += 1
        for token in result.tokens:
            found.tokens.setdefault(token.row, []).append(token)
        for one in result.rounds:
            found.rounds.setdefault(one.row, []).append(one)
        found.cached |= result.cached
        if waiting and steps == after:
            numbers += runtime.admit(waiting)
            waiting = []
    assert sorted(found.tokens) == numbers
    return found


def computed(runtime: LLMInferenceRuntime) -> int:
    """Tokens of prompts that were computed since the last time that this was asked."""
    metrics = runtime.prefill_metrics
    tokens, metrics.tokens = metrics.tokens, 0
    return tokens


EXACT_INT4 = pytest.param(
    "int4",
    marks=pytest.mark.skipif(
        INT4_EXACT not in cpu_instructions(),
        reason="ONNX Runtime's products of int4 round a single row differently on this CPU",
    ),
)


def check_equal(found: Sequence[RowToken], wanted: Sequence[RowToken], *, exact: bool) -> None:
    """The same tokens with the same log probabilities: to the bit, else but for rounding."""
    pairs = list(zip(found, wanted, strict=True))
    assert [one.token_id for one, _ in pairs] == [other.token_id for _, other in pairs]
    for one, other in pairs:
        if exact:
            assert one.top == other.top
        assert one.logprob is not None
        assert other.logprob is not None
        assert abs(one.logprob - other.logprob) < 1e-4
