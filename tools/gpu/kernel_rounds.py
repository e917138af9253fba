"""`python -m tools.gpu.kernel_rounds`: rounds of the shipped model by kernels against plain steps.

One JSON line for each shape of tree and batch: seconds a token of both, tokens a round, and how
long the host takes for each part of a round.
"""

import json
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import structs

from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from hearth.runtime.request import GenerationRequest, RowRequest
from hearth.runtime.text import Tokenizer
from models.splits import held_out
from tests.gpu.conftest import CAPACITY, DRAFT, MODEL
from tests.gpu.near_ties import greedy_row

SHAPES = ((10, 6, 60), (4, 3, 16), (8, 4, 32), (1, 7, 8))
TOKENS, BATCHES = 80, (1, 8)


def generate(runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> dict[str, Any]:
    """Generate twice; figures of the second time."""
    runtime.handle_request(GenerationRequest(rows=rows))
    before = structs.replace(runtime.speculation_metrics)
    began = time.perf_counter()
    found = runtime.handle_request(GenerationRequest(rows=rows))
    seconds = time.perf_counter() - began
    tokens = sum(len(row.token_ids) for row in found.rows)
    figures = {"tokens": tokens, "decode_us_a_token": round(found.decode_s / tokens * 1e6, 1)}
    metrics = runtime.speculation_metrics
    for name in structs.asdict(metrics):
        old, new = getattr(before, name), getattr(metrics, name)
        if isinstance(new, (int, float)) and new != old:
            figures[name] = round(new - old, 6)
    return figures | {"seconds": round(seconds, 4)}


def host_parts(runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> dict[str, float]:
    """Microseconds of the host, the median of rounds: what queues a round, and what ends it."""
    strategy: Any = runtime._speculation  # noqa: SLF001 - what is timed lies inside
    parts: dict[str, list[float]] = {}

    def timed(owner: Any, name: str) -> None:
        inner, label = getattr(owner, name), f"{type(owner).__name__}.{name}"

        def outer(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*given, **named)
            finally:
                parts.setdefault(label, []).append(time.perf_counter() - began)

        setattr(owner, name, outer)

    draft = getattr(strategy.proposer, "_draft", None)
    if draft is not None:
        timed(draft, "propose")
    timed(strategy.proposer, "propose")
    timed(strategy._runner, "execute_eagle_base_tree_decoding_step")  # noqa: SLF001 - likewise
    timed(strategy._runner, "commit_path")  # noqa: SLF001 - likewise
    timed(strategy._sampler, "verify")  # noqa: SLF001 - likewise
    timed(strategy, "verify_step")
    timed(strategy, "_commit")
    runtime.handle_request(GenerationRequest(rows=rows))
    return {name: round(statistics.median(each) * 1e6, 1) for name, each in parts.items()}


def main() -> None:
    """Export, and print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "kernels"
        options = ExportOptions(
            backend="kernels",
            device="cuda",
            dtype="float16",
            capacity=CAPACITY,
            draft=DraftOptions(folder=DRAFT),
        )
        export_model(MODEL, engine, options)
        tokenizer = Tokenizer.open(engine)
        prompts = [
            tokenizer.encode_pairs([(one["role"], one["content"]) for one in prompt.messages])
            for prompt in held_out()[::150][:8]
        ]
        rows = [greedy_row(prompt, TOKENS) for prompt in prompts]
        for shape in (None, *SHAPES):
            speculation = SpeculationOptions(method="off")
            if shape is not None:
                names = ("drafting_top_k", "drafting_step", "verify_tree_size")
                eagle = EagleDraftingConfig(**dict(zip(names, shape, strict=True)))
                speculation = SpeculationOptions(method="eagle", eagle=eagle, adaptive=False)
            with closing(
                LLMInferenceRuntime.open(engine, RuntimeOptions(speculation=speculation))
            ) as runtime:
                runtime.capture(range(1, runtime.max_batch + 1))
                for batch in BATCHES:
                    made: dict[str, Any] = {"shape": shape, "batch": batch}
                    made |= generate(runtime, rows[:batch])
                    if shape is not None:
                        made["host_us"] = host_parts(runtime, rows[:batch])
                    sys.stdout.write(json.dumps(made) + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
