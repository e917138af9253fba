"""From pixels to embeddings, beside the processors and towers of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.export.options import Dialect, ExportOptions
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.image_processing.patches import patch
from hearth.runtime.image_processing.sizes import layout_of
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER, VisionConfig
from tests.runtime.image_processing.photographs import draw, photo
from tests.vision_models import FAMILIES, Family, write_vision_model

SIZES = [(96, 64), (40, 120), (57, 83)]
TOLERANCE = 1e-4


def embed(folder: Path, config: VisionConfig) -> list[NDArray[Any]]:
    """All pictures at once: [1 + deepstack features, tokens, output_size] each."""
    images = []
    for size in SIZES:
        layout = layout_of(photo(*size), config)
        patches = np.empty((layout.patches, config.patch_bytes), np.uint8)
        patch(Image.fromarray(draw(*size)), layout, config, patches)
        images.append((patches, layout))
    runner = VisionRunner.open(folder, config, EngineOptions(threads=1), CpuDevice())
    out = runner.encode(images)
    runner.close()
    return out


@pytest.mark.reference
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_of_photographs_are_those_of_transformers(
    tmp_path: Path, family: Family, dialect: Dialect
) -> None:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    source = write_vision_model(tmp_path / "model", family)
    config = write_vision(source, tmp_path, ExportOptions(dialect=dialect))
    assert config is not None
    ours = embed(tmp_path / VISION_FOLDER, config)
    model = transformers.AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
    for size, (embeddings, *features) in zip(SIZES, ours, strict=True):
        given = processor(Image.fromarray(draw(*size)), return_tensors="pt")
        given = {name: given[name] for name in ("pixel_values", "image_grid_thw") if name in given}
        with torch.no_grad():
            seen = model.eval().model.get_image_features(**given)
        wanted = torch.cat(list(seen.pooler_output)).numpy()
        np.testing.assert_allclose(embeddings, wanted, atol=TOLERANCE, rtol=0)
        stacked = getattr(seen, "deepstack_features", None) or []
        assert len(features) == len(stacked) == config.num_deepstack_features
        for one, other in zip(features, stacked, strict=True):
            wanted = torch.cat(list(other)).numpy()
            np.testing.assert_allclose(one, wanted, atol=TOLERANCE, rtol=0)
