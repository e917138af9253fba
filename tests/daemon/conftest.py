from pathlib import Path

import pytest

from runtime.export import ExportOptions, export_model

REFERENCE = Path(__file__).parent.parent / "references" / "qwen3"


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine folder of a random model: 4 rows of 96 tokens. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("engines") / "tiny"
    export_model(REFERENCE, folder, ExportOptions(capacity=96, max_batch=4))
    return folder
