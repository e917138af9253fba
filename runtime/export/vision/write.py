"""Writes the folder `visual` of an engine folder."""

from pathlib import Path

import msgspec

from runtime.engine_folder import DATA_FILE, MODEL_FILE, record_files
from runtime.export.checkpoint import Checkpoint
from runtime.export.classic import OPSET as CLASSIC_OPSET
from runtime.export.graph import GraphBuilder
from runtime.export.native import OPSET as NATIVE_OPSET
from runtime.export.onnx_files import IR_VERSION, IR_VERSION_NATIVE
from runtime.export.options import ExportOptions
from runtime.export.vision.layout import check_tower, without_model
from runtime.export.vision.spelling import ClassicTower, NativeTower
from runtime.export.vision.tower import Tower
from runtime.export.vision.tower_model import TowerModel, load_tower
from runtime.export.weights import Weights
from runtime.export.writer import DataFile
from runtime.vision_config import VISION_CONFIG_FILE, VISION_FOLDER, VisionConfig


def write_vision(source: Path, folder: Path, options: ExportOptions) -> VisionConfig | None:
    """Write the tower of the model in `source` into `folder`/visual; None for a text model.

    Raises `model_unsupported`, `model_invalid` or `tokenizer_mismatch`, naming the file, tensor or
    field at fault.
    """
    tower = load_tower(source, options)
    if tower is None:
        return None
    checkpoint = Checkpoint(source, without_model)
    check_tower(checkpoint, tower)
    target = folder / VISION_FOLDER
    target.mkdir()
    write_tower(target, tower, checkpoint)
    config = msgspec.structs.replace(tower.config, files=record_files(target))
    write_vision_config(target, config)
    return config


def write_tower(folder: Path, tower: TowerModel, checkpoint: Checkpoint) -> None:
    """Write `model.onnx` and `model.onnx.data` in the dialect of the configuration."""
    native = tower.config.dialect == "native"
    spelling = NativeTower if native else ClassicTower
    weights = Weights(checkpoint, tower.config)
    with (folder / DATA_FILE).open("wb") as file:
        data = DataFile(file, lambda _: None)
        graph = GraphBuilder(data, DATA_FILE, NATIVE_OPSET if native else CLASSIC_OPSET)
        Tower(graph, spelling(graph, tower, weights.dtype), checkpoint, weights).build()
    graph.save(folder / MODEL_FILE, IR_VERSION_NATIVE if native else IR_VERSION, "tower")


def write_vision_config(folder: Path, config: VisionConfig) -> None:
    """Write the configuration, one field a line."""
    text = msgspec.json.format(msgspec.json.encode(config), indent=1)
    (folder / VISION_CONFIG_FILE).write_bytes(text + b"\n")
