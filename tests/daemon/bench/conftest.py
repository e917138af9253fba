from pathlib import Path

import pytest

from daemon.bench.random_model import QUICK_SHAPE, write_random_model
from daemon.bench.toy_engine import toy_engine


@pytest.fixture(scope="session")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "quick"
    write_random_model(folder, QUICK_SHAPE)
    return folder


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_engine(tmp_path_factory.mktemp("toy"))
