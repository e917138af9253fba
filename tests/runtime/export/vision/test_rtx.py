"""Towers parsed and built by a real builder, which needs no GPU."""

from pathlib import Path
from typing import Any

import pytest

from runtime.engine_folder import MODEL_FILE, PLAN_FILE
from runtime.export.options import Dialect, ExportOptions, TargetType
from runtime.export.tensorrt.options import PlanOptions
from runtime.export.vision.write import write_vision
from runtime.vision_config import VISION_FOLDER
from tests.vision_models import FAMILIES, Family, write_vision_model

pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")
pytestmark = [pytest.mark.rtx, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PLAN = PlanOptions(builder="tensorrt_rtx")
# Heads of 72 and 80 elements, as those of Qwen3-VL and Qwen2.5-VL.
HEADS = {"qwen3_vl": 144, "qwen2_5_vl": 160, "idefics3": 32}


@pytest.mark.parametrize(
    ("dialect", "dtype", "served"),
    [("native", "float16", "native"), ("native", "float32", "classic")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_builder_takes_a_tower(
    tmp_path: Path, family: Family, dialect: Dialect, dtype: TargetType, served: str
) -> None:
    """There is no fused attention for float32, where primitive operators take its place."""
    vision: dict[str, Any] = {"hidden_size": HEADS[family]}
    source = write_vision_model(tmp_path / "m", family, vision=vision)
    options = ExportOptions(dialect=dialect, dtype=dtype, plan=PLAN)
    config = write_vision(source, tmp_path, options)
    assert config is not None
    assert (config.dialect, config.dtype, config.backend) == (served, dtype, "tensorrt")
    assert config.plan is not None
    assert config.device == "cuda"
    folder = tmp_path / VISION_FOLDER
    assert (folder / PLAN_FILE).stat().st_size > 10_000
    assert not (folder / MODEL_FILE).exists()
