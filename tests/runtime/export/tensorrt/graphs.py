"""Engine folders whose plan was not built, so that the graph that builders get can be looked at."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.export import DraftOptions, ExportOptions, engine_files, export, export_model
from hearth.runtime.export.options import Dialect, PlanOptions, TargetType
from tests.eagle_models import write_draft
from tests.references import reference_folder

CAPACITY, MAX_BATCH, CHUNK = 48, 4, 8
PLAN = PlanOptions(builder="tensorrt_rtx")
WIDE = PlanOptions(builder="tensorrt_rtx", kv_cache_dtype="float32")


def export_graph(
    model: str | Path,
    target: Path,
    dialect: Dialect,
    dtype: TargetType,
    draft: DraftOptions | None = None,
    *,
    plan: PlanOptions = PLAN,
    **more: Any,
) -> None:
    """Write everything of a TensorRT engine folder of a model but the plan."""

    def keep_graph(_folder: Path, config: LLMEngineRunnerConfig, *_: object) -> object:
        return config

    with (
        patch.object(engine_files, "build_or_fall_back", keep_graph),
        patch.object(export, "settle_options", lambda options: options),
    ):
        options = graph_options(dialect, dtype, draft, plan=plan, **more)
        export_model(_folder(model), target, options)


def small_draft(model: str | Path, folder: Path) -> DraftOptions:
    """A draft of a model, with small trees."""
    draft = write_draft(_folder(model), folder / "draft_model", form="offset", vocabulary=60)
    return DraftOptions(folder=draft, max_verify_tree_size=9, drafting_top_k=2, drafting_step=3)


def graph_options(
    dialect: Dialect,
    dtype: TargetType,
    draft: DraftOptions | None = None,
    *,
    plan: PlanOptions = PLAN,
    **more: Any,
) -> ExportOptions:
    """Options of a small plan."""
    return ExportOptions(
        dialect=dialect,
        dtype=dtype,
        capacity=CAPACITY,
        max_batch=MAX_BATCH,
        prefill_chunk=CHUNK,
        plan=plan,
        draft=draft,
        **more,
    )


def _folder(model: str | Path) -> Path:
    """That of a reference model, if it is a name."""
    return model if isinstance(model, Path) else reference_folder(model)
