"""The cases of `bench decode --device cuda`: models of random weights, engines and batch sizes."""

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import structs

from bench.cases import CAPACITY, exported
from bench.random_model import (
    QUICK_SHAPE,
    SHAPE_06B,
    SHAPE_4B,
    write_random_model,
)
from runtime.config import LLMEngineRunnerConfig, load_config
from runtime.export import ExportOptions, Progress
from runtime.export.tensorrt.options import PlanOptions
from runtime.memory.sizes import ITEM_BYTES, projection_bytes

GPUEngine = Literal["ort-cuda", "tensorrt"]
GPUModel = Literal["0.6b", "4b"]
HalfType = Literal["float16", "bfloat16"]
ENGINES: tuple[GPUEngine, ...] = ("ort-cuda", "tensorrt")
LARGEST_BATCH = 8
_SHAPES = {"0.6b": SHAPE_06B, "4b": SHAPE_4B}


class GPUCase(msgspec.Struct, frozen=True):
    """A model at a batch size."""

    model: GPUModel
    batch: int

    @property
    def name(self) -> str:
        """The case in the keys of the figures, behind the engine's name."""
        return f"{self.model}/b{self.batch}"


GPU_CASES = {
    case.name: case
    for case in (GPUCase("0.6b", 1), GPUCase("0.6b", 8), GPUCase("4b", 1), GPUCase("4b", 8))
}


def random_source(model: GPUModel, cache: Path, progress: Progress, *, quick: bool = False) -> Path:
    """The Hugging Face folder of a model, made if it is not in `cache` yet."""
    folder = cache / ("quick-gpu" if quick else f"qwen3-{model}-pooled")
    if not folder.is_dir():
        write_random_model(
            folder,
            QUICK_SHAPE if quick else _SHAPES[model],
            pooled=not quick,
            progress=lambda done, total: progress("random weights", done, total),
        )
    return folder


def export_options(engine: GPUEngine, dtype: HalfType, python: str) -> ExportOptions:
    """What a GPU engine of the bench is exported with; one folder serves both batch sizes.

    `python` is the interpreter that has TensorRT's builder.
    """
    options = ExportOptions(dtype=dtype, capacity=CAPACITY, max_batch=LARGEST_BATCH)
    if engine == "ort-cuda":
        return structs.replace(options, device="cuda")
    # The machine that builds may have another TensorRT than the one that runs the plan.
    batches = tuple(sorted({case.batch for case in GPU_CASES.values()}))
    plan = PlanOptions(python=python, version_compatible=True, decode_batches=batches)
    return structs.replace(options, plan=plan)


def engine_folder(source: Path, cache: Path, options: ExportOptions, progress: Progress) -> Path:
    """The engine folder of a model, exported if it is not in `cache` yet; raises HearthError."""
    kind = "onnxruntime" if options.plan is None else options.plan.builder
    return exported(source, cache, f"{source.name}-{kind}-{options.dtype}", options, progress)


def step_bytes(config: LLMEngineRunnerConfig, batch: int, context: float) -> float:
    """Bytes that a decode step must read: every weight once, and K/V of `context` slots a row."""
    slot = 2 * config.num_attention_layers * config.num_kv_heads * config.head_dim
    return projection_bytes(config) + batch * context * slot * ITEM_BYTES[config.kv_cache_dtype]


def engine_step_bytes(folder: Path, batch: int, context: float) -> float:
    """`step_bytes` of an engine folder."""
    return step_bytes(load_config(folder), batch, context)
