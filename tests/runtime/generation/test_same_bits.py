"""Why a prefix may come from any step: keys and values have the same bits in each.

It is what reuse without a difference rests on, and true for native float32 on the CPU, and for int4
where `is_exact` says so.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.bench.random_model import Shape, write_random_model
from hearth.runtime.batch import BatchReorder
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RowRequest
from tests.runtime.generation.prefix_rows import EXACT_INT4, needs_native

pytestmark = needs_native
TOKENS, ROWS = 330, 2
DECODE = 0
PLANS = (
    (1, TOKENS - 1),
    (TOKENS - 1, 1),
    (TOKENS - 1, DECODE),
    (*[32] * 10, 10),
    (130, 3, 2, *[1] * 4, *[DECODE] * 21, 170),
    (270, *[DECODE] * 60),
)
"""Widths of the chunks in which a prompt is computed, and decode steps of one token."""
SHAPE = Shape(
    layers=2, hidden=320, heads=6, kv_heads=3, head_dim=64, intermediate=640, vocabulary=1024
)
"""Sums longer than the blocks in which a matrix product adds them up."""
PROMPTS = np.random.default_rng(0).integers(300, 1000, (ROWS, TOKENS))


@pytest.fixture(params=["none", EXACT_INT4])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLMInferenceRuntime]:
    quantization: Literal["none", "int4"] = request.param
    write_random_model(tmp_path / "model", SHAPE)
    options = ExportOptions(
        dialect="native",
        quantization=quantization,
        head_quantization="body",
        capacity=512,
        prefill_chunk=TOKENS,
    )
    export_model(tmp_path / "model", tmp_path / "engine", options)
    chosen = RuntimeOptions(verify=False, max_batch=ROWS)
    with closing(LLMInferenceRuntime.open(tmp_path / "engine", chosen)) as opened:
        yield opened


def computed(
    runtime: LLMInferenceRuntime, plan: tuple[int, ...], rows: int
) -> tuple[list[NDArray[np.float32]], NDArray[np.float32]]:
    """Keys and values of the first row, and the logits behind it, when `rows` run together."""
    runner = runtime._runner
    request = RowRequest(token_ids=[1], prompt_length=1)
    runner.reset(0)
    runner.get_kv_cache().reorder(BatchReorder.fresh([request] * rows))
    at = 0
    for width in plan:
        piece = PROMPTS[:rows, at : at + max(width, 1)].copy()
        if width == DECODE:
            runner._inputs.next_tokens.array[:rows] = piece[:, 0]
            logits = runner.execute_vanilla_decoding_step(rows)
        else:
            logits = runner.execute_prefill_step(piece, [width] * rows)
        at += piece.shape[1]
    assert at == TOKENS
    size = runtime.config.output_vocab_size
    return runner.get_kv_cache().capture(0, at).attention, logits.array.reshape(-1)[:size].copy()


def test_a_token_has_the_same_bits_in_whatever_step_it_is_computed(
    runtime: LLMInferenceRuntime,
) -> None:
    wanted, logits = computed(runtime, (TOKENS,), 1)
    for plan in PLANS:
        for rows in (1, ROWS):
            found, last = computed(runtime, plan, rows)
            for one, other in zip([*found, last], [*wanted, logits], strict=True):
                assert one.tobytes() == other.tobytes(), (plan, rows)
