"""Engine folders whose plan was not built, so that the graph that builders get can be looked at."""

from pathlib import Path
from unittest.mock import patch

from runtime.config import LLMEngineRunnerConfig
from runtime.export import ExportOptions, export, export_model
from runtime.export.options import Dialect, TargetType
from runtime.export.tensorrt.options import PlanOptions
from tests.references import reference_folder

CAPACITY, MAX_BATCH, CHUNK = 48, 4, 8


def export_graph(name: str, target: Path, dialect: Dialect, dtype: TargetType) -> None:
    """Write everything of a TensorRT engine folder of a reference model but the plan."""

    def keep_graph(_folder: Path, config: LLMEngineRunnerConfig, *_: object) -> object:
        return config

    with patch.multiple(
        export, build_or_fall_back=keep_graph, settle_dialect=lambda options: options
    ):
        export_model(reference_folder(name), target, graph_options(dialect, dtype))


def graph_options(dialect: Dialect, dtype: TargetType) -> ExportOptions:
    """Options of a small plan."""
    return ExportOptions(
        dialect=dialect,
        dtype=dtype,
        capacity=CAPACITY,
        max_batch=MAX_BATCH,
        prefill_chunk=CHUNK,
        plan=PlanOptions(builder="tensorrt_rtx"),
    )
