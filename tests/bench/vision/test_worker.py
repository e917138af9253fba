from pathlib import Path

import pytest

from hearth.bench.vision.photographs import SIZES, photograph
from hearth.bench.vision.worker import PictureJob, PictureWorker
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from tests.bench.running import hide
from tests.vision_models import write_vision_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("seeing") / "model", "qwen3_vl")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "picture.jpg"
    file.write_bytes(photograph(SIZES[0]))
    return file


def test_hearth_makes_patches_and_nothing_else(model: Path, picture: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    export_model(model, engine, ExportOptions(max_batch=1, capacity=64))
    worker = PictureWorker(PictureJob(contender="hearth", path=str(engine)), tmp_path / "log")
    assert worker.works == ["patches"]
    looked = worker.look("patches", picture)
    assert looked.seconds > 0
    assert looked.rss_bytes > 0
    with pytest.raises(HearthError, match="in its daemon"):
        worker.look("first_token", picture)
    worker.close()


def test_a_missing_library_says_what_installs_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(tmp_path, "torch", monkeypatch)
    job = PictureJob(contender="transformers", path=str(model))
    with pytest.raises(HearthError, match="pip install torch"):
        PictureWorker(job, tmp_path / "log")
