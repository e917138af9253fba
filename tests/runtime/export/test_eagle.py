"""Draft engines against the forward pass in NumPy."""

from pathlib import Path

import pytest

from hearth.runtime.config import load_config
from hearth.runtime.engine_folder import DRAFT_FOLDER
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from tests.eagle_models import write_draft
from tests.references import NAMES, reference_folder
from tests.runtime.conftest import EngineFolders
from tests.runtime.export.drafts import compare_draft
from tests.runtime.export.trees import export_with_draft
from tests.vision_models import write_vision_model


@pytest.mark.parametrize("name", NAMES)
def test_committed_tokens_and_a_tree_agree(
    tree_folders: EngineFolders, name: str, dialect: str
) -> None:
    compare_draft(tree_folders(name, dialect), reference_folder(name), 1e-4)


def test_float16_is_close(tmp_path: Path, dialect: str) -> None:
    folder = export_with_draft("llama", tmp_path, dialect=dialect, dtype="float16")
    compare_draft(folder, reference_folder("llama"), 0.05)


def test_a_draft_of_a_model_that_takes_images_has_tables_of_every_row(
    tmp_path: Path, dialect: str
) -> None:
    base = write_vision_model(tmp_path / "m", "qwen3_vl")
    folder = export_with_draft(base, tmp_path, dialect=dialect)
    config = load_config(folder / DRAFT_FOLDER)
    assert config.use_context_dependent_rope
    assert config.rope_config.mrope_interleaved
    assert (config.num_deepstack_features, config.image_token_id) == (0, 5)
    compare_draft(folder, base, 1e-4)


def test_a_draft_may_count_images_as_text(tmp_path: Path) -> None:
    base = write_vision_model(tmp_path / "m", "qwen3_vl")
    draft = write_draft(base, tmp_path / "draft", rope_scaling=None)
    export_model(base, tmp_path / "e", ExportOptions(draft=DraftOptions(folder=draft)))
    config = load_config(tmp_path / "e" / DRAFT_FOLDER)
    assert (config.rope_config.type, config.use_context_dependent_rope) == ("default", False)
