"""The cases of `bench decode` and the files that they need, made once and kept in a cache."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import msgspec
import onnx_ir
from msgspec import structs

from hearth.bench import pooled
from hearth.bench.contenders import gguf_model
from hearth.bench.contenders.gguf_model import GGUFType, write_gguf
from hearth.bench.pooled import gguf_tensors, write_pooled_engine
from hearth.bench.random_model import (
    QUICK_SHAPE,
    SHAPE_06B,
    SHAPE_4B,
    Shape,
    write_random_model,
    write_shape,
)
from hearth.bench.report import note
from hearth.daemon.shipped import SOURCE
from hearth.runtime import export as exporter
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.engine_folder import MODEL_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, Progress, export_model
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.options import PlanOptions
from hearth.runtime.memory.sizes import ITEM_BYTES, projection_bytes

Precision = Literal["fp32", "int8", "int4"]
Quantization = Literal["none", "int8", "int4"]
GPUEngine = Literal["kernels", "kernels-int8", "kernels-int4", "ort-cuda", "tensorrt"]
Peer = Literal["transformers", "torch_compile", "llama_cpp"]
GPUModel = Literal["0.6b", "4b"]
DType = Literal["float16", "bfloat16", "float32"]
ENGINES: tuple[GPUEngine, ...] = get_args(GPUEngine)
PEERS: tuple[Peer, ...] = get_args(Peer)
CAPACITY = 1024
GPU_CAPACITY = 2048
SHORT_CONTEXT, LONG_CONTEXT = 128, 1000
LARGEST_BATCH = 8
_STORED: dict[Precision, tuple[Quantization, GGUFType]] = {
    "fp32": ("none", "F32"),
    "int8": ("int8", "Q8_0"),
    "int4": ("int4", "Q4_0"),
}
_EXPORTER = tuple(sorted(Path(exporter.__path__[0]).rglob("*.py")))
_CONVERTER = (Path(gguf_model.__file__),)
_POOLED = (Path(pooled.__file__),)


class Case(msgspec.Struct, frozen=True):
    """A model at a precision; `steps` are taken in a row between two changes of contender."""

    model: Literal["0.6b", "tiny"]
    precision: Precision
    steps: int

    @property
    def name(self) -> str:
        """The case's key in the figures."""
        return f"{self.model}/{self.precision}"


class GPUCase(msgspec.Struct, frozen=True):
    """A model at a batch size, with `context` tokens in each row in the middle of the steps."""

    model: GPUModel
    batch: int
    context: int = SHORT_CONTEXT

    @property
    def name(self) -> str:
        """The case in the keys of the figures, behind the engine's name."""
        longer = "" if self.context == SHORT_CONTEXT else f"/{self.context}"
        return f"{self.model}/b{self.batch}{longer}"

    @property
    def slots(self) -> int:
        """Slots of each row in a cache that does not grow."""
        return 2 * SHORT_CONTEXT if self.context == SHORT_CONTEXT else GPU_CAPACITY


CASES = {
    case.name: case
    for case in (
        Case("0.6b", "fp32", 10),
        Case("0.6b", "int8", 20),
        Case("0.6b", "int4", 20),
        Case("tiny", "fp32", 50),
    )
}
GPU_MODELS: tuple[GPUModel, ...] = get_args(GPUModel)
GPU_CASES = {
    case.name: case
    for model, context, batch in product(GPU_MODELS, (SHORT_CONTEXT, LONG_CONTEXT), (1, 8))
    for case in (GPUCase(model, batch, context),)
}
_GPU_STORED: dict[GPUEngine, tuple[Quantization, GGUFType]] = {
    "kernels-int8": ("int8", "Q8_0"),
    "kernels-int4": ("int4", "Q4_0"),
}
_GPU_TYPES: dict[DType, GGUFType] = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


class Artifacts(msgspec.Struct, frozen=True, kw_only=True):
    """The same weights for everyone; `gguf` is None without the peer's converter.

    `weight_bytes` is what one decode step of the engine must read.
    """

    source: Path
    engine: Path
    gguf: Path | None
    weight_bytes: int


def chosen_cases(names: Sequence[str]) -> list[Case]:
    """The named cases, or without names all whose model is there; raises `engine_missing`."""
    cases = [CASES[name] for name in names or CASES]
    if (SOURCE / "config.json").is_file() or all(case.model != "tiny" for case in cases):
        return cases
    where = f"the shipped model is not at {SOURCE}"
    if names:
        raise HearthError("engine_missing", f"{where}: choose other cases", "case")
    note(f"{where}: its case is left out")
    return [case for case in cases if case.model != "tiny"]


def prepare(case: Case, cache: Path, progress: Progress, *, quick: bool = False) -> Artifacts:
    """Make what is not in `cache` yet; raises the errors of exporting."""
    source = SOURCE
    if case.model != "tiny":
        source = random_source(case.model, cache, progress, quick=quick, pooled=False)
    quantization, kind = _STORED[case.precision]
    options = ExportOptions(quantization=quantization, capacity=CAPACITY, max_batch=1)
    engine = exported(source, cache, f"{source.name}-{case.precision}", options, progress)
    return Artifacts(
        source=source,
        engine=engine,
        gguf=gguf_file(kind, source, cache, progress),
        weight_bytes=weight_bytes(engine),
    )


def random_source(
    model: GPUModel, cache: Path, progress: Progress, *, quick: bool = False, pooled: bool = True
) -> Path:
    """The Hugging Face folder of a model, or of a toy, made if it is not in `cache` yet."""
    folder = cache / ("quick" if quick else f"qwen3-{model}{'-pooled' if pooled else ''}")
    if not folder.is_dir():
        write_random_model(
            folder,
            _shape(model, quick=quick),
            pooled=pooled and not quick,
            progress=lambda done, total: progress("random weights", done, total),
        )
    return folder


def export_options(engine: GPUEngine, dtype: DType, python: str) -> ExportOptions:
    """Options that a GPU engine of the bench is exported with; one folder serves both batch sizes.

    `python` is the interpreter that has TensorRT's builder.
    """
    options = ExportOptions(dtype=dtype, capacity=GPU_CAPACITY, max_batch=LARGEST_BATCH)
    if engine == "ort-cuda":
        return structs.replace(options, backend="onnxruntime", device="cuda")
    if engine != "tensorrt":
        quantization, _ = _GPU_STORED.get(engine, ("none", ""))
        return structs.replace(options, backend="kernels", device="cuda", quantization=quantization)
    # The machine that builds may have another TensorRT than the one that runs the plan.
    batches = tuple(sorted({case.batch for case in GPU_CASES.values()}))
    plan = PlanOptions(python=python, version_compatible=True, decode_batches=batches)
    return structs.replace(options, plan=plan)


def gguf_type(engine: GPUEngine, dtype: DType) -> GGUFType:
    """Storage of llama.cpp's weights that is compared with an engine."""
    _, kind = _GPU_STORED.get(engine, ("none", _GPU_TYPES[dtype]))
    return kind


def shape_source(model: GPUModel, cache: Path, *, quick: bool = False) -> Path:
    """A folder with configuration and tokenizer of a model, without weights."""
    folder = cache / f"{'quick' if quick else f'qwen3-{model}'}-shape"
    if not folder.is_dir():
        write_shape(folder, _shape(model, quick=quick))
    return folder


def _shape(model: GPUModel, *, quick: bool) -> Shape:
    return QUICK_SHAPE if quick else {"0.6b": SHAPE_06B, "4b": SHAPE_4B}[model]


def gpu_engine(
    engine: GPUEngine,
    model: GPUModel,
    options: ExportOptions,
    cache: Path,
    progress: Progress,
    *,
    quick: bool = False,
) -> Path:
    """The folder of a GPU engine of a model of random weights; raises the errors of exporting.

    Those of kernels are written straight from a pool, others are exported from a checkpoint.
    """
    if options.engine != "kernels":
        source = random_source(model, cache, progress, quick=quick)
        return engine_folder(source, cache, options, progress)
    source = shape_source(model, cache, quick=quick)
    stem = f"{source.name}-{engine}-{options.dtype}"
    name = f"{stem}-{made_digest(source, (*_EXPORTER, *_POOLED), options)}"
    return _kept(cache / name, stem, lambda to: write_pooled_engine(source, to, options))


def pooled_gguf(
    model: GPUModel, kind: GGUFType, cache: Path, *, quick: bool = False
) -> Path | None:
    """A model of random weights as a GGUF file; None without the converter."""
    source = shape_source(model, cache, quick=quick)
    tensors = partial(gguf_tensors, load_model_config(source), kind)
    return _gguf(kind, source, cache, (*_CONVERTER, *_POOLED), partial(write_gguf, tensors=tensors))


def engine_folder(source: Path, cache: Path, options: ExportOptions, progress: Progress) -> Path:
    """The GPU engine folder of a model, exported if it is not in `cache`; raises HearthError."""
    kind: str = options.engine if options.plan is None else options.plan.builder
    if options.quantization != "none":
        kind = f"{kind}-{options.quantization}"
    return exported(source, cache, f"{source.name}-{kind}-{options.dtype}", options, progress)


def exported(
    source: Path, cache: Path, stem: str, options: ExportOptions, progress: Progress
) -> Path:
    """The engine folder of a model, made if it is not in `cache` yet; raises the errors of export.

    Its name begins with `stem`. Folders can have gigabytes each: of one stem the newest is kept.
    """
    name = f"{stem}-{made_digest(source, _EXPORTER, options)}"
    return _kept(cache / name, stem, lambda to: export_model(source, to, options, progress))


def gguf_file(kind: GGUFType, source: Path, cache: Path, progress: Progress) -> Path | None:
    """The model as a GGUF file, made if it is not in `cache` yet; None without the converter."""
    write = partial(write_gguf, progress=partial(progress, kind))
    return _gguf(kind, source, cache, _CONVERTER, write)


def _gguf(
    kind: GGUFType,
    source: Path,
    cache: Path,
    code: tuple[Path, ...],
    write: Callable[[Path, Path, GGUFType], None],
) -> Path | None:
    stem = f"{source.name}-{kind}"
    target = cache / f"{stem}-{made_digest(source, code)}.gguf"
    try:
        return _kept(target, stem, lambda to: write(source, to, kind))
    except ImportError:
        return None


def _kept(target: Path, stem: str, make: Callable[[Path], object]) -> Path:
    if not target.exists():
        for stale in target.parent.glob(f"{stem}-*"):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        make(target)
    return target


def weight_bytes(engine: Path) -> int:
    """Bytes of all constants of the engine's graph, wherever they are stored."""
    model = onnx_ir.load(engine / MODEL_FILE)
    constants = (value.const_value for value in model.graph.initializers.values())
    return sum(constant.nbytes for constant in constants if constant is not None)


def step_bytes(config: LLMEngineRunnerConfig, batch: int, context: float) -> float:
    """Bytes that a decode step must read: every weight once, and K/V of `context` slots a row."""
    slot = 2 * config.num_attention_layers * config.num_kv_heads * config.head_dim
    return projection_bytes(config) + batch * context * slot * ITEM_BYTES[config.kv_cache_dtype]


def made_digest(source: Path, code: tuple[Path, ...], options: ExportOptions | None = None) -> str:
    """A digest of what a result is made of: the model's files, the converting code, its options."""
    digest = hashlib.sha256((source / "config.json").read_bytes())
    for path in sorted(source.glob("*.safetensors")):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    for path in code:
        digest.update(path.read_bytes())
    digest.update(repr(options).encode())
    return digest.hexdigest()[:12]
