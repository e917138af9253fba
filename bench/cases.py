"""The cases of `bench decode` and the files that they need, made once and kept in a cache."""

import hashlib
import shutil
from pathlib import Path
from typing import Literal

import msgspec
import onnx_ir

import runtime.export
from bench import gguf_model
from bench.gguf_model import GGUFType, write_gguf
from bench.random_model import QUICK_SHAPE, SHAPE_06B, write_random_model
from daemon.shipped import SOURCE
from runtime.engine_folder import MODEL_FILE
from runtime.errors import HearthError
from runtime.export import ExportOptions, Progress, export_model

Precision = Literal["fp32", "int8", "int4"]
CAPACITY = 1024
_QUANTIZATION: dict[Precision, Literal["none", "int8", "int4"]] = {
    "fp32": "none",
    "int8": "int8",
    "int4": "int4",
}
_EXPORTER = tuple(sorted(Path(runtime.export.__path__[0]).rglob("*.py")))
_CONVERTER = (Path(gguf_model.__file__),)
_GGUF: dict[Precision, GGUFType] = {"fp32": "F32", "int8": "Q8_0", "int4": "Q4_0"}


class Case(msgspec.Struct, frozen=True):
    """A model at a precision; `steps` are taken in a row between two changes of contender."""

    model: Literal["0.6b", "tiny"]
    precision: Precision
    steps: int

    @property
    def name(self) -> str:
        """The case's key in the figures."""
        return f"{self.model}/{self.precision}"


CASES = {
    case.name: case
    for case in (
        Case("0.6b", "fp32", 10),
        Case("0.6b", "int8", 20),
        Case("0.6b", "int4", 20),
        Case("tiny", "fp32", 50),
    )
}


class Artifacts(msgspec.Struct, frozen=True, kw_only=True):
    """The same weights for everyone; `gguf` is None without the peer's converter.

    `weight_bytes` is what one decode step of the engine must read.
    """

    source: Path
    engine: Path
    gguf: Path | None
    weight_bytes: int


def prepare(case: Case, cache: Path, progress: Progress, *, quick: bool = False) -> Artifacts:
    """Make what is not in `cache` yet; raises `engine_missing` where the shipped model is not."""
    source = _source(case, cache, progress, quick=quick)
    options = ExportOptions(
        quantization=_QUANTIZATION[case.precision], capacity=CAPACITY, max_batch=1
    )
    stem = f"{source.name}-{case.precision}"
    engine = exported(source, cache, stem, options, progress)
    return Artifacts(
        source=source,
        engine=engine,
        gguf=_gguf(case, source, cache, progress),
        weight_bytes=weight_bytes(engine),
    )


def exported(
    source: Path, cache: Path, stem: str, options: ExportOptions, progress: Progress
) -> Path:
    """The engine folder of a model, made if it is not in `cache` yet; raises what export raises.

    Its name begins with `stem`. Folders can have gigabytes each: of one stem the newest is kept.
    """
    folder = cache / f"{stem}-{made_digest(source, _EXPORTER, options)}"
    if not folder.is_dir():
        for stale in cache.glob(f"{stem}-*"):
            shutil.rmtree(stale)
        export_model(source, folder, options, progress)
    return folder


def weight_bytes(engine: Path) -> int:
    """Bytes of all constants of the engine's graph, wherever they are stored."""
    model = onnx_ir.load(engine / MODEL_FILE)
    constants = (value.const_value for value in model.graph.initializers.values())
    return sum(constant.nbytes for constant in constants if constant is not None)


def _source(case: Case, cache: Path, progress: Progress, *, quick: bool) -> Path:
    if case.model == "tiny":
        if not (SOURCE / "config.json").is_file():
            raise HearthError(
                "engine_missing",
                f"the shipped model is not at {SOURCE}: choose other cases",
                "case",
            )
        return SOURCE
    name, shape = ("quick", QUICK_SHAPE) if quick else ("qwen3-0.6b", SHAPE_06B)
    folder = cache / name
    if not folder.is_dir():
        write_random_model(
            folder, shape, progress=lambda done, total: progress("random weights", done, total)
        )
    return folder


def _gguf(case: Case, source: Path, cache: Path, progress: Progress) -> Path | None:
    kind = _GGUF[case.precision]
    target = cache / f"{source.name}-{kind}-{made_digest(source, _CONVERTER)}.gguf"
    try:
        if not target.is_file():
            for stale in cache.glob(f"{source.name}-{kind}-*"):
                stale.unlink()
            write_gguf(source, target, kind, lambda done, total: progress(kind, done, total))
    except ImportError:
        return None
    return target


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
