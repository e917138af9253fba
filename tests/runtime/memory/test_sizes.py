from pathlib import Path
from typing import Literal

import pytest

from hearth.runtime.engine_folder import DATA_FILE
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.memory.sizes import kv_cache_bytes, projection_bytes
from tests.references import reference_folder
from tests.runtime.engine_configs import small_config


def test_caches_grow_with_their_slots() -> None:
    config = small_config()
    assert kv_cache_bytes(config, 1, 1) == 2 * 2 * 1 * 8 * 4
    assert kv_cache_bytes(config, 3, 16) == 48 * kv_cache_bytes(config, 1, 1)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_bytes_of_projections_are_those_of_the_data_file(
    tmp_path: Path, quantization: Literal["none", "int8", "int4"]
) -> None:
    folder = tmp_path / "engine"
    options = ExportOptions(quantization=quantization)
    config = export_model(reference_folder("qwen3_untied"), folder, options)
    stored = (folder / DATA_FILE).stat().st_size
    padding = 2 * 4096 * (4 * config.num_decoder_layers + 1)
    assert stored - padding <= projection_bytes(config) <= stored
