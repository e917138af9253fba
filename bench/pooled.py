"""Models of random weights straight in the form in which an engine of kernels and others read them.

Every tensor is a slice of one pool of numbers, so a model of any size takes the time in which
it is written. Its numbers repeat, which the speed of a matrix product does not notice. What takes
time and is not needed for that is left out: the checkpoint, and the known answer.
"""

import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hearth.bench.contenders.gguf_model import GGUFType, Named
from hearth.runtime.config import WEIGHTS_FILE, LLMEngineRunnerConfig
from hearth.runtime.engine_folder import write_config
from hearth.runtime.export import ExportOptions
from hearth.runtime.export.engine_files import engine_config, record, write_rope
from hearth.runtime.export.external_weights import seal_own
from hearth.runtime.export.kernels_export import HEAD, Part, write_kernel_weights
from hearth.runtime.export.layout import EMBEDDING, expected_tensors
from hearth.runtime.export.model_config import ModelConfig, load_model_config
from hearth.runtime.export.text_files import copy_text_files
from hearth.runtime.export.weights import pack, round_weights
from hearth.runtime.files import fresh_folder
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.weights.weights_file import EMBEDDING as TABLE
from hearth.runtime.weights.weights_file import write_layout

Array = NDArray[Any]
POOL = 1 << 22
_UNIT = 128
"""Tensors begin at a multiple of it, so that blocks of quantised weights stay whole."""
_PIECE = 1 << 20


def write_pooled_engine(source: Path, target: Path, options: ExportOptions) -> None:
    """An engine folder of kernels; `source` has the configuration and the tokenizer.

    Raises the errors of exporting.
    """
    model = load_model_config(source)
    config = structs.replace(engine_config(model, options), model_name=source.name)
    parts = partial(_parts, dict(expected_tensors(model)), config)
    with fresh_folder(target) as folder:
        copy_text_files(source, folder, model)
        write_rope(folder, model, config.max_kv_cache_capacity)
        layout = write_kernel_weights(folder / WEIGHTS_FILE, model, parts, config, _no_progress)
        write_layout(folder, layout)
        seal_own(folder, config.model_name)
        write_config(folder, structs.replace(config, files=record(folder, None)))


def gguf_tensors(model: ModelConfig, kind: GGUFType) -> Iterator[Named]:
    """The tensors of llama.cpp's file, as `write_gguf` takes them: matrices as bytes of `kind`."""
    import gguf  # noqa: PLC0415 - a peer's library, present after `make bench-env` only

    quantisation = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantisation]

    @lru_cache
    def stored(width: float) -> Array:
        found: Array = gguf.quantize(_numbers(width)[None], quantisation)
        return found.view(np.uint8).reshape(-1)

    for name, shape in expected_tensors(model):
        if len(shape) == 1:
            yield name, shape, partial(_gains, *shape)
            continue
        unit = _UNIT // block * size
        rows, length = shape[0], shape[1] // block * size
        form = partial(stored, _width(name, shape[1]))
        yield name, shape, partial(_matrix, name, form, unit, (rows, length))


def _parts(
    shapes: dict[str, tuple[int, ...]], config: LLMEngineRunnerConfig, name: str, source: str
) -> Iterator[Part]:
    dtype, shape = numpy_dtype(config.dtype), shapes[source]
    if len(shape) == 1:
        yield Part(name, dtype, shape, [_gains(*shape).astype(dtype)])
        return
    rows, columns = shape
    kind = config.head_weights if name == HEAD else config.weight_quantization
    width = _width(source, columns)
    if kind == "none" or name == TABLE:
        pieces = _pieces(name, _rounded(width, dtype), _UNIT, rows * columns)
        yield Part(name, dtype, shape, pieces)
        return
    block, bits = config.weight_block_size, 4 if kind == "int4" else 8
    integers, scales = _quantised(width, kind, block, dtype)
    count = rows * columns * bits // 8
    byte, scale = np.dtype(np.uint8), (rows, columns // block)
    pieces = _pieces(name, integers, _UNIT * bits // 8, count)
    yield Part(name, byte, (rows, columns * bits // 8), pieces)
    yield Part(
        f"{name}.scale", dtype, scale, _pieces(name, scales, _UNIT // block, scale[0] * scale[1])
    )


def _pieces(name: str, pool: Array, unit: int, count: int) -> Iterator[Array]:
    """`count` items of the pool, from a place that follows from the name on, round and round."""
    place = zlib.crc32(name.encode()) % (pool.size // unit) * unit
    while count:
        taken = min(count, _PIECE, pool.size - place)
        yield pool[place : place + taken]
        place, count = (place + taken) % pool.size, count - taken


def _matrix(name: str, pool: Callable[[], Array], unit: int, shape: tuple[int, int]) -> Array:
    count = shape[0] * shape[1]
    return np.concatenate(list(_pieces(name, pool(), unit, count))).reshape(shape)


def _width(source: str, columns: int) -> float:
    # As wide as in a random checkpoint: small beside the layers' outputs where tokens come in.
    return (0.16 if source == EMBEDDING else 0.64) / float(columns**0.5)


@lru_cache
def _normals() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(POOL, np.float32)


@lru_cache
def _numbers(width: float) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = _normals() * np.float32(width)
    return scaled


@lru_cache
def _rounded(width: float, dtype: np.dtype[Any]) -> Array:
    return _numbers(width).astype(dtype)


@lru_cache
def _quantised(width: float, kind: Any, block: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    made = round_weights(_numbers(width)[None], kind, block, dtype, signed=True)
    integers = pack(made.integers) if kind == "int4" else made.integers
    return integers.reshape(-1), made.scales.reshape(-1)


def _gains(size: int) -> NDArray[np.float32]:
    gains: NDArray[np.float32] = 1 + np.float32(0.1) * _normals()[:size]
    return gains


def _no_progress(_count: int) -> None:
    """Report no progress, for work that is over at once."""
