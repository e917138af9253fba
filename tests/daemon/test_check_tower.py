"""What `hearth check` says of a model that sees."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hearth.daemon.check import inspect_engine, with_answer
from hearth.daemon.cli.check import check
from hearth.daemon.configuration.settings import settings_of
from hearth.runtime.engine_folder import ANSWER_FILE, record_files
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.vision_config import VISION_CONFIG_FILE, VISION_FOLDER
from tests.vision_models import write_vision_model

SETTINGS = settings_of(threads=1)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine folder with a tower. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("seeing")
    source = write_vision_model(folder / "model", "qwen3_vl")
    export_model(source, folder / "engine", ExportOptions(capacity=96, max_batch=2))
    return folder / "engine"


def changed(seeing: Path, folder: Path, **fields: Any) -> Path:
    """A copy whose tower's configuration has other fields, and whose records are true."""
    copy = shutil.copytree(seeing, folder) / VISION_FOLDER / VISION_CONFIG_FILE
    copy.write_text(json.dumps(json.loads(copy.read_text()) | fields))
    return folder


def test_the_tower_is_in_the_table_and_in_the_report(seeing: Path) -> None:
    report = inspect_engine(SETTINGS, seeing)
    assert report.tower is not None
    assert (report.tower.family, report.tower.layers, report.tower.image_tokens) == (
        "qwen3_vl", 4, 36,
    )  # fmt: skip
    fewer = inspect_engine(settings_of(threads=1, image_tokens=20), seeing).tower
    assert fewer is not None
    assert fewer.image_tokens == 16
    result = CliRunner().invoke(check, ["--engine", str(seeing), "--threads", "1", "--answer"])
    assert result.exit_code == 0
    for words in ("qwen3_vl, 4 layers, float32", "36 tokens for a large one", "right: "):
        assert words in result.output


def test_a_wrong_tower_cannot_be_served(seeing: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(seeing, tmp_path / "engine")
    path = folder / VISION_FOLDER / ANSWER_FILE
    answer = json.loads(path.read_text())
    answer["mixes"][1][2][3] += 1
    path.write_text(json.dumps(answer))
    with pytest.raises(HearthError) as error:
        inspect_engine(SETTINGS, folder)
    assert (error.value.code, error.value.field) == ("engine_corrupt", ANSWER_FILE)
    files = record_files(folder / VISION_FOLDER)
    records = {name: {"bytes": one.bytes, "sha256": one.sha256} for name, one in files.items()}
    told = changed(folder, tmp_path / "told", files=records)
    report = with_answer(inspect_engine(SETTINGS, told), SETTINGS, told)
    assert (report.ok, report.code, report.answer) == (False, "wrong_answer", "wrong")
    assert "deepstack_0" in (report.reason or "")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"output_size": 32}, "output_size"),
        ({"deepstack_layers": [0]}, "deepstack_layers"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_a_tower_of_another_model_is_refused(
    seeing: Path, tmp_path: Path, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(HearthError) as error:
        inspect_engine(SETTINGS, changed(seeing, tmp_path / "engine", **fields))
    assert (error.value.code, error.value.field) == ("engine_corrupt", field)
