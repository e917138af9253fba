"""Vision towers on a GPU: each has to give its known answer."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hearth.runtime.device.device import Device
from hearth.runtime.device.open import open_device
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.export import ExportOptions
from hearth.runtime.export.options import Dialect, TargetType
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.generation.assembly import share_context_memory
from hearth.runtime.tower_answer import check_tower_answer
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER, load_vision_config
from tests.vision_models import FAMILIES, Family, write_vision_model

pytestmark = pytest.mark.gpu
PLANS_VARIABLE = "HEARTH_TEST_VISION_PLANS"
"""Names a folder of engine folders that see, whose plans this machine can run."""


@pytest.fixture
def device() -> Iterator[Device]:
    with closing(open_device("cuda")) as opened:
        yield opened


def answers_right(engine: Path, device: Device) -> None:
    config, folder = load_vision_config(engine), engine / VISION_FOLDER
    assert config is not None
    with closing(VisionRunner.open(folder, config, EngineOptions(), device)) as runner:
        share_context_memory([runner.executor], device)
        report = check_tower_answer(runner, folder)
    assert report.error < 1


@pytest.mark.parametrize(
    ("dialect", "dtype"), [("native", "float16"), ("classic", "float16"), ("classic", "float32")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_onnx_runtime_gives_the_known_answer(
    tmp_path: Path, family: Family, dialect: Dialect, dtype: TargetType, device: Device
) -> None:
    source = write_vision_model(tmp_path / "m", family)
    write_vision(
        source,
        tmp_path,
        ExportOptions(dialect=dialect, dtype=dtype, backend="onnxruntime", device="cuda"),
    )
    answers_right(tmp_path, device)


def test_plans_give_the_known_answer(device: Device) -> None:
    folder = os.environ.get(PLANS_VARIABLE)
    if not folder:
        pytest.skip(f"{PLANS_VARIABLE} names no folder")
    engines = [path.parent for path in sorted(Path(folder).glob(f"*/{VISION_FOLDER}"))]
    assert engines
    for engine in engines:
        answers_right(engine, device)
