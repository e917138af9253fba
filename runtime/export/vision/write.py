"""Writes the folder `visual` of an engine folder."""

import math
from pathlib import Path

import msgspec

from runtime.engine_folder import ANSWER_FILE, DATA_FILE, MODEL_FILE, record_files
from runtime.errors import HearthError
from runtime.export.checkpoint import Checkpoint
from runtime.export.classic import OPSET as CLASSIC_OPSET
from runtime.export.graph import GraphBuilder
from runtime.export.known_answer import Rehearsal
from runtime.export.native import OPSET as NATIVE_OPSET
from runtime.export.onnx_files import IR_VERSION, IR_VERSION_NATIVE
from runtime.export.options import ExportOptions
from runtime.export.progress import Meter, Progress
from runtime.export.tensorrt.options import PlanOptions
from runtime.export.tensorrt.plan import build_or_fall_back
from runtime.export.vision.layout import check_tower, expected_tensors, without_model
from runtime.export.vision.spelling import ClassicTower, NativeTower, PrimitiveTower, TowerSpelling
from runtime.export.vision.tower import Tower
from runtime.export.vision.tower_answer import tower_answer
from runtime.export.vision.tower_model import TowerModel, load_tower
from runtime.export.weights import Weights
from runtime.export.writer import DataFile
from runtime.tensors.dtypes import numpy_dtype
from runtime.vision_config import VISION_CONFIG_FILE, VISION_FOLDER, VisionConfig


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
    _write_config(target, config)
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
        _write_graph(folder, tower._replace(config=config), checkpoint, progress)

    write_graph(tower.config)
    if plan is None:
        return tower.config
    return build_or_fall_back(folder, tower.config, plan, write_graph, progress)


def _write_graph(
    folder: Path, tower: TowerModel, checkpoint: Checkpoint, progress: Progress | None
) -> None:
    native = tower.config.dialect == "native"
    size = numpy_dtype(tower.config.dtype).itemsize
    meter = Meter(progress, "vision weights", size * _elements(tower))
    spelling: type[TowerSpelling] = NativeTower if native else ClassicTower
    if not native and tower.config.backend == "tensorrt":
        spelling = PrimitiveTower
    weights = Weights(checkpoint, tower.config)
    with (folder / DATA_FILE).open("wb") as file:
        data = DataFile(file, meter.add)
        graph = GraphBuilder(data, DATA_FILE, NATIVE_OPSET if native else CLASSIC_OPSET)
        Tower(graph, spelling(graph, tower, weights.dtype), checkpoint, weights).build()
    graph.save(folder / MODEL_FILE, IR_VERSION_NATIVE if native else IR_VERSION, "tower")
    meter.finish()


def _write_answer(
    folder: Path, tower: TowerModel, checkpoint: Checkpoint, progress: Progress | None
) -> None:
    meter = Meter(progress, "vision answer", 4 * _elements(tower))
    answer = tower_answer(tower, Rehearsal(checkpoint, tower.config, meter.add))
    (folder / ANSWER_FILE).write_bytes(msgspec.json.encode(answer))
    meter.finish()


def _elements(tower: TowerModel) -> int:
    return sum(math.prod(shape) for _, shape in expected_tensors(tower))


def _write_config(folder: Path, config: VisionConfig) -> None:
    text = msgspec.json.format(msgspec.json.encode(config), indent=1)
    (folder / VISION_CONFIG_FILE).write_bytes(text + b"\n")
