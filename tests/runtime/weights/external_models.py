"""Engines with external weights, and what they generate."""

from pathlib import Path
from typing import Any

from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.export import ExportOptions, export_model
from runtime.options import RuntimeOptions
from runtime.request import RequestOptions, RowRequest

Given = list[tuple[int, int, list[float]]]


def export(source: Path, target: Path, **options: Any) -> Path:
    """An engine folder with external weights, unless `options` say otherwise."""
    export_model(source, target, ExportOptions(**{"external_weights": True, **options}))
    return target


def generated(folder: Path, **options: Any) -> Given:
    """Row, token and likeliest logits of each of some steps of three rows."""
    runtime = LLMInferenceRuntime.open(folder, RuntimeOptions(threads=1, **options))
    asked = RequestOptions(max_tokens=8, ignore_eos=True, logprobs=3)
    rows = [
        RowRequest(token_ids=[1, 2, 3 + row], prompt_length=3, options=asked) for row in range(3)
    ]
    given: Given = []
    try:
        runtime.admit(rows)
        while runtime.active:
            for one in runtime.step().tokens:
                given.append((one.row, one.token_id, [top.logprob for top in one.top]))
    finally:
        runtime.close()
    return given
