from pathlib import Path

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.image_processing.headers import read_header
from tests.bench.running import run
from tests.system.faults.bad_pictures import _bad_pictures
from tests.system.faults.command import faults
from tests.vision_models import write_vision_model


def test_the_pictures_are_what_they_are_called() -> None:
    bad = {one.name: one for one in _bad_pictures()}
    assert len(bad["100 megapixels"].data) < 50_000
    with pytest.raises(HearthError, match="10000 x 10000"):
        read_header(memoryview(bad["100 megapixels"].data))
    assert len(bad["bomb in a text chunk"].data) < 100_000
    wrong = read_header(memoryview(bad["another size than its header's"].data))
    assert (wrong.width, wrong.height) == (640, 480)
    long = read_header(memoryview(bad["1x10000"].data))
    assert (long.width, long.height) == (1, 10_000)


@pytest.mark.slow
def test_a_row_about_pictures_needs_a_model_that_sees(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    export_model(model, tmp_path / "engine", ExportOptions(max_batch=2, capacity=1024))
    seeing = ("--seeing", str(tmp_path / "engine"))
    code, figures = run("their places", *seeing, command=faults)
    assert (code, figures["survived"], figures["lost"]) == (0, 1, 0)
    row = figures["rows"]["Images and their places"]
    assert row["placeholders"] > 0
    assert row["words_and_no_picture"] == "length"
