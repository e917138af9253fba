"""Writes the folder `visual` of an engine folder."""

import math
from collections.abc import Sequence
from math import erf
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.engine_folder import (
    ANSWER_FILE,
    DATA_FILE,
    MODEL_FILE,
    record_files,
    write_config,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.dialect import CLASSIC_OPSET, NATIVE_OPSET
from hearth.runtime.export.graph import GraphBuilder
from hearth.runtime.export.known_answer import LEAST_TOLERANCE, ROUNDINGS, ToleranceProbe
from hearth.runtime.export.onnx_files import IR_VERSION, IR_VERSION_NATIVE
from hearth.runtime.export.options import ExportOptions, PlanOptions
from hearth.runtime.export.reference_pass import RoundedWeights, rotate, softmax
from hearth.runtime.export.tensorrt.plan import build_or_fall_back
from hearth.runtime.export.vision.layout import (
    Merger,
    check_tower,
    expected_tensors,
    has_bias,
    tower_names,
    without_model,
)
from hearth.runtime.export.vision.tower import (
    ClassicVisionDialect,
    NativeVisionDialect,
    PrimitiveVisionDialect,
    Tower,
    VisionDialect,
)
from hearth.runtime.export.vision.tower_model import TowerModel, load_tower
from hearth.runtime.export.weights import Weights
from hearth.runtime.export.writer import DataFile, Progress, ProgressCounter
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.tower_answer import TowerAnswer, answer_pictures, mixed
from hearth.runtime.vision.tower_inputs import Segment, segments_of, tower_inputs
from hearth.runtime.vision_config import VISION_FOLDER, VisionConfig

Array = NDArray[np.float32]
_erf = np.vectorize(erf, otypes=[np.float32])


def reference_outputs(
    tower: TowerModel,
    weights: RoundedWeights,
    patches: NDArray[np.uint8],
    segments: Sequence[Segment],
) -> list[Array]:
    """Embeddings [..., tokens, output size] of patches [..., T, patch bytes], then deepstack's."""
    config, names = tower.config, tower_names(tower)
    given = tower_inputs(segments, config)
    x = linear(pixels(patches, tower), tower, weights, names.patch)
    if names.positions is not None:
        rows = weights.table(f"{names.positions}.weight")[given["position_ids"]]
        if "position_weights" in given:
            rows = rows * given["position_weights"][..., None]
        x = x + rows.sum(axis=0)
    merger, *mergers = names.mergers
    features: list[Array] = []
    for layer in range(config.num_layers):
        windows = config.window_size and layer not in config.full_attention_layers
        groups = given["window_ids" if windows else "segment_ids"]
        name = names.layer.format(layer)
        normal = normalise(x, tower, weights, f"{name}.{names.norms[0]}")
        parts = [linear(normal, tower, weights, f"{name}.{part}") for part in names.qkv]
        context = attention(np.concatenate(parts, -1), groups, given, tower)
        x = x + linear(context, tower, weights, f"{name}.{names.attended}")
        normal = normalise(x, tower, weights, f"{name}.{names.norms[1]}")
        x = x + mlp(normal, tower, weights, [f"{name}.{part}" for part in names.mlp])
        if layer in config.deepstack_layers:
            features.append(merge(x, tower, weights, mergers[len(features)]))
    return [merge(x, tower, weights, merger), *features]


def pixels(patches: NDArray[np.uint8], tower: TowerModel) -> Array:
    """Colours of patches, which come one behind the other, scaled and normalised."""
    rules = tower.config.rules
    mean, std = (np.array(one, np.float32)[:, None] for one in (rules.mean, rules.std))
    colours = patches.reshape(*patches.shape[:-1], 3, -1) * np.float32(rules.scale)
    normal: Array = ((colours - mean) / std).reshape(patches.shape)
    return normal


def linear(x: Array, tower: TowerModel, weights: RoundedWeights, name: str) -> Array:
    """A product with its bias, if it has one."""
    product = weights.project(x, f"{name}.weight")
    return product + weights.vector(f"{name}.bias") if has_bias(tower, name) else product


def normalise(x: Array, tower: TowerModel, weights: RoundedWeights, name: str) -> Array:
    """Layer normalisation; of Qwen2.5-VL by the root mean square."""
    epsilon, bias = np.float32(tower.norm_eps), np.float32(0)
    if has_bias(tower, name):
        x, bias = x - x.mean(axis=-1, keepdims=True), weights.vector(f"{name}.bias")
    root = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + epsilon)
    normal: Array = x / root * weights.vector(f"{name}.weight") + bias
    return normal


def attention(
    qkv: Array, groups: NDArray[np.int64], given: dict[str, Array], tower: TowerModel
) -> Array:
    """Attention among the patches of one of `groups` [T], of projections [..., T, 3H]."""
    config = tower.config
    shape = (*qkv.shape[:-1], 3, config.num_heads, config.head_dim)
    q, k, v = np.moveaxis(qkv.reshape(shape), -3, 0).swapaxes(-2, -3)
    if "rotary_cos" in given:
        q, k = (rotate(one, given["rotary_cos"], given["rotary_sin"]) for one in (q, k))
    scores = q @ k.swapaxes(-1, -2) * np.float32(config.head_dim**-0.5)
    apart = groups[:, None] != groups
    context = softmax(np.where(apart, np.float32(-np.inf), scores)) @ v
    joined: Array = context.swapaxes(-2, -3).reshape(*qkv.shape[:-1], config.hidden_size)
    return joined


def mlp(x: Array, tower: TowerModel, weights: RoundedWeights, names: Sequence[str]) -> Array:
    """Up and down, or gate, up and down."""
    *ups, down = names
    inner = linear(x, tower, weights, ups[0])
    if tower.is_gated:
        inner = inner / (1 + np.exp(-inner)) * linear(x, tower, weights, ups[1])
    elif tower.activation == "gelu_tanh":
        slope = np.float32((2 / np.pi) ** 0.5) * (inner + np.float32(0.044715) * inner**3)
        inner = inner * (1 + np.tanh(slope)) / 2
    else:
        inner = gelu(inner)
    return linear(inner, tower, weights, down)


def merge(x: Array, tower: TowerModel, weights: RoundedWeights, merger: Merger) -> Array:
    """Tokens [..., T / merge^2, output size] of the patches of each."""
    together = (*x.shape[:-2], -1, tower.merged_size)
    if merger.joins:
        x = normalise(x.reshape(together), tower, weights, merger.norm)
    else:
        x = normalise(x, tower, weights, merger.norm).reshape(together)
    *inner, last = merger.products
    for name in inner:
        x = gelu(linear(x, tower, weights, name))
    return linear(x, tower, weights, last)


def gelu(x: Array) -> Array:
    """Hendrycks and Gimpel, Gaussian Error Linear Units, 2016."""
    active: Array = x * (1 + _erf(x * np.float32(0.5**0.5))) / 2
    return active


def tower_answer(tower: TowerModel, weights: ToleranceProbe) -> TowerAnswer:
    """Run the tower over its pictures; raises `model_invalid` for numbers that are not finite.

    Tolerances are measured as those of a decoder: a second pass puts rounded inputs into every
    product.
    """
    pictures = answer_pictures(tower.config)
    patches = np.concatenate([patches for patches, _ in pictures])
    segments = [segment for _, layout in pictures for segment in segments_of(layout)]
    # As in a decoder, a gate far below zero is closed by an infinite power.
    with np.errstate(over="ignore", invalid="ignore"):
        both = reference_outputs(tower, weights, np.stack([patches, patches]), segments)
    exact, engine = np.stack(both, axis=1)
    dtype = tower.config.dtype
    if tower.config.output_dtype is not None:
        engine = engine.astype(numpy_dtype(tower.config.output_dtype)).astype(np.float32)
    mixes, rounded = mixed(exact), mixed(engine)
    if not (np.isfinite(mixes).all() and np.isfinite(rounded).all()):
        raise HearthError(
            "model_invalid", f"the vision tower computes numbers that are not finite in {dtype}"
        )
    off = ROUNDINGS[dtype] * np.abs(rounded - mixes).max(axis=(1, 2))
    least = LEAST_TOLERANCE * mixes.std(axis=(1, 2))
    return TowerAnswer(
        mixes=tuple(tuple(tuple(sums) for sums in output) for output in mixes.tolist()),
        tolerances=tuple(np.maximum(off, least).tolist()),
    )


def write_vision(
    source: Path, folder: Path, options: ExportOptions, progress: Progress | None = None
) -> VisionConfig | None:
    """Write the tower of the model in `source` into `folder`/visual; None for a text model.

    Raises `model_unsupported`, `model_invalid`, `tokenizer_mismatch` or an error of an option,
    naming the file, tensor or field at fault.
    """
    tower = load_tower(source, options)
    if tower is None:
        if options.max_patches:
            raise HearthError(
                "unsupported_option", "the model has no vision tower: leave it out", "max_patches"
            )
        return None
    checkpoint = Checkpoint(source, without_model)
    check_tower(checkpoint, tower)
    target = folder / VISION_FOLDER
    target.mkdir()
    config = _write_engine(target, tower, checkpoint, options.plan, progress)
    _write_answer(target, tower._replace(config=config), checkpoint, progress)
    config = msgspec.structs.replace(config, files=record_files(target))
    write_config(target, config)
    return config


def _write_engine(
    folder: Path,
    tower: TowerModel,
    checkpoint: Checkpoint,
    plan: PlanOptions | None,
    progress: Progress | None,
) -> VisionConfig:
    """Write the graph, and of it the plan if one is wanted; the configuration that it has then."""

    def write_graph(config: VisionConfig) -> None:
        made, native = tower._replace(config=config), config.dialect == "native"
        size = numpy_dtype(config.dtype).itemsize
        counter = ProgressCounter(progress, "vision weights", size * _elements(made))
        dialect: type[VisionDialect] = NativeVisionDialect if native else ClassicVisionDialect
        if not native and config.backend == "tensorrt":
            dialect = PrimitiveVisionDialect
        weights = Weights(checkpoint, config)
        with (folder / DATA_FILE).open("wb") as file:
            data = DataFile(file, counter.add)
            graph = GraphBuilder(data, DATA_FILE, NATIVE_OPSET if native else CLASSIC_OPSET)
            Tower(graph, dialect(graph, made, weights.dtype), checkpoint, weights).build()
        graph.save(folder / MODEL_FILE, IR_VERSION_NATIVE if native else IR_VERSION, "tower")
        counter.finish()

    write_graph(tower.config)
    if plan is None:
        return tower.config
    return build_or_fall_back(folder, tower.config, plan, write_graph, progress)


def _write_answer(
    folder: Path, tower: TowerModel, checkpoint: Checkpoint, progress: Progress | None
) -> None:
    counter = ProgressCounter(progress, "vision answer", 4 * _elements(tower))
    answer = tower_answer(tower, ToleranceProbe(checkpoint, tower.config, counter.add))
    (folder / ANSWER_FILE).write_bytes(msgspec.json.encode(answer))
    counter.finish()


def _elements(tower: TowerModel) -> int:
    return sum(math.prod(shape) for _, shape in expected_tensors(tower))
