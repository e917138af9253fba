"""Engines with external weights, and what they generate."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions, RowRequest
from tests.runtime.export.hugging_face import Tensors, change_tensors

Given = list[tuple[int, int, list[float]]]
needs_other_weights = pytest.mark.skipif(
    not hasattr(ort.SessionOptions, "add_external_initializers_from_files_in_memory"),
    reason="this ONNX Runtime serves the engine folder's own weights alone",
)


def export(source: Path, target: Path, **options: Any) -> Path:
    """An engine folder with external weights, unless `options` say otherwise."""
    export_model(source, target, ExportOptions(**{"external_weights": True, **options}))
    return target


def generated(folder: Path, **options: Any) -> Given:
    """Row, token and likeliest logits of each of some steps of three rows."""
    runtime = LLMInferenceRuntime.open(folder, RuntimeOptions(**{"threads": 1, **options}))
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


def tuned(model: Path, target: Path, seed: int = 1) -> Path:
    """Another fine-tune of the shape of a model: all of its numbers moved a little."""
    shutil.copytree(model, target)
    random = np.random.default_rng(seed)

    def move(tensors: Tensors) -> None:
        for name, values in tensors.items():
            noise = 0.05 * random.normal(size=values.shape)
            tensors[name] = (values + noise).astype(values.dtype)

    change_tensors(target, move)
    return target


def with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a safetensors file, which keeps its length."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    data[8 : 8 + length] = json.dumps(header).encode().ljust(length)
    path.write_bytes(data)
