"""The graphs of towers against transformers."""

from pathlib import Path

import numpy as np
import pytest

from hearth.runtime.export.options import Dialect, ExportOptions
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.vision.tower_inputs import Segment
from hearth.runtime.vision_config import VISION_FOLDER
from tests.references.towers import GRIDS, live_outputs, patches_of, stored_outputs
from tests.runtime.export.vision.tower_driver import run_tower
from tests.vision_models import FAMILIES, SPELLINGS, Family, Spelling, write_vision_model

TOLERANCE = 1e-4


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_transformers(
    tmp_path: Path, family: Family, spelling: Spelling, dialect: Dialect
) -> None:
    source = write_vision_model(tmp_path / "m", family, spelling)
    config = write_vision(source, tmp_path, ExportOptions(dialect=dialect))
    assert config is not None
    segments = [Segment(height, width) for t, height, width in GRIDS[family] for _ in range(t)]
    given = run_tower(tmp_path / VISION_FOLDER, config, segments, patches_of(family))
    wanted = stored_outputs(family)
    assert set(given) == set(wanted)
    assert len(given) == 1 + config.num_deepstack_features
    for name, values in wanted.items():
        assert values.std() > 0.1
        np.testing.assert_allclose(given[name], values, atol=TOLERANCE, rtol=0)


@pytest.mark.reference
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_stored_outputs_are_those_of_the_installed_transformers(
    tmp_path: Path, family: Family, spelling: Spelling
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    live = live_outputs(tmp_path / "m", family, spelling)
    wanted = stored_outputs(family)
    assert set(live) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(live[name], values, atol=1e-5, rtol=0)
