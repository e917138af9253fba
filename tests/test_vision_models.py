"""What transformers says of the small models that see."""

from pathlib import Path
from typing import Any

import pytest

from tests.vision_models import FAMILIES, SPELLINGS, Family, Spelling, write_vision_model


@pytest.mark.reference
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_takes_every_tensor(
    tmp_path: Path, family: Family, spelling: Spelling
) -> None:
    pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    folder = write_vision_model(tmp_path / "m", family, spelling)
    model, told = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told.values()), told
    assert model.config.image_token_id in (4, 5)
    sections = getattr(model.config.text_config, "rope_parameters", {}).get("mrope_section")
    assert sections == (None if family == "idefics3" else [4, 2, 2])


@pytest.mark.reference
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_processor(
    tmp_path: Path, family: Family, spelling: Spelling
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    folder = write_vision_model(tmp_path / "m", family, spelling)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    assert processor.size["longest_edge"] == (128 if family == "idefics3" else 65_536)
