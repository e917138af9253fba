"""Draft engines against the forward pass in NumPy."""

from pathlib import Path

import pytest

from tests.references import NAMES
from tests.runtime.conftest import EngineFolders
from tests.runtime.export.drafts import compare_draft
from tests.runtime.export.trees import export_with_draft


@pytest.mark.parametrize("name", NAMES)
def test_committed_tokens_and_a_tree_agree(
    tree_folders: EngineFolders, name: str, dialect: str
) -> None:
    compare_draft(tree_folders(name, dialect), name, 1e-4)


def test_float16_is_close(tmp_path: Path, dialect: str) -> None:
    folder = export_with_draft("llama", tmp_path, dialect=dialect, dtype="float16")
    compare_draft(folder, "llama", 0.05)
