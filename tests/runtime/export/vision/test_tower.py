"""The graphs of towers against transformers, and against each other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.export.options import Dialect, ExportOptions
from runtime.export.vision.write import write_vision
from runtime.vision.tower_inputs import Segment
from runtime.vision_config import VISION_FOLDER
from tests.runtime.export.vision.tower_driver import random_patches, run_tower
from tests.vision_models import FAMILIES, SPELLINGS, Family, Spelling, write_vision_model

Array = NDArray[Any]
TOLERANCE = 1e-4
# Two pictures of different sizes and shapes; those of Idefics3 are tiles.
GRIDS = {
    "qwen3_vl": [(1, 4, 6), (1, 10, 4), (2, 2, 4)],
    "qwen2_5_vl": [(1, 4, 6), (1, 10, 14), (2, 2, 4)],
    "idefics3": [(1, 4, 4), (1, 4, 4), (1, 4, 4)],
}


@pytest.mark.reference
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_transformers(
    tmp_path: Path, family: Family, spelling: Spelling, dialect: Dialect
) -> None:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    source = write_vision_model(tmp_path / "m", family, spelling)
    config = write_vision(source, tmp_path, ExportOptions(dialect=dialect))
    assert config is not None
    loader = transformers.AutoModelForImageTextToText
    model, told = loader.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values()), told
    grids = GRIDS[family]
    segments = [Segment(height, width) for time, height, width in grids for _ in range(time)]
    patches = random_patches(config, segments)
    given = run_tower(tmp_path / VISION_FOLDER, config, segments, patches)
    rules = config.rules
    colours = patches.reshape(len(patches), 3, -1) * np.float32(rules.scale)
    mean, std = (np.array(one, np.float32)[:, None] for one in (rules.mean, rules.std))
    pixels = ((colours - mean) / std).reshape(len(patches), -1)
    with torch.no_grad():
        wanted = _transformers(torch, model.model.eval(), family, pixels, grids)
    assert set(given) == set(wanted)
    for name, values in wanted.items():
        assert values.std() > 0.1
        np.testing.assert_allclose(given[name], values, atol=TOLERANCE, rtol=0)


def _transformers(
    torch: Any, model: Any, family: Family, pixels: Array, grids: list[tuple[int, int, int]]
) -> dict[str, Array]:
    if family == "idefics3":
        tiles = np.stack([_tile(part) for part in np.split(pixels, len(grids))])
        seen = model.vision_model(torch.tensor(tiles)).last_hidden_state
        return {"embeddings": model.connector(seen).flatten(0, 1).numpy()}
    out = model.visual(torch.tensor(pixels), torch.tensor(grids))
    wanted = {"embeddings": out.pooler_output.numpy()}
    features = getattr(out, "deepstack_features", None) or []
    return wanted | {f"deepstack_{k}": one.numpy() for k, one in enumerate(features)}


def _tile(patches: Array) -> Array:
    """A tile [3, 32, 32] of its 16 patches, which come in blocks of 2 x 2."""
    blocks = patches.reshape(2, 2, 2, 2, 3, 8, 8)
    tile: Array = blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, 32, 32)
    return tile
