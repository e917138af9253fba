from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import onnxruntime
import pytest

from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from tests.references import reference_folder
from tests.runtime.export.trees import export_with_draft

EngineFolders = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def engine_folders(tmp_path_factory: pytest.TempPathFactory) -> EngineFolders:
    """Gives the engine folder of a stored reference model in a dialect, exported once."""

    @cache
    def folder(name: str, dialect: str) -> Path:
        target = tmp_path_factory.mktemp("engines") / f"{name}-{dialect}"
        options = ExportOptions(dialect="native" if dialect == "native" else "classic")
        export_model(reference_folder(name), target, options)
        return target

    return folder


@pytest.fixture(scope="session")
def tree_folders(tmp_path_factory: pytest.TempPathFactory) -> EngineFolders:
    """Gives the folder of a base and a draft engine in a dialect, exported once."""

    @cache
    def folder(name: str, dialect: str) -> Path:
        return export_with_draft(name, tmp_path_factory.mktemp("trees"), dialect=dialect)

    return folder


@pytest.fixture(params=["native", "classic"])
def dialect(request: pytest.FixtureRequest) -> str:
    """Each dialect that the installed ONNX Runtime reads."""
    version = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if request.param == "native" and version < (1, 24):
        pytest.skip("this ONNX Runtime reads opset 23 at most")
    return str(request.param)


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaDevice]:
    try:
        device = open_cuda_device()
    except HearthError as error:
        pytest.skip(f"no GPU: {error.message}")
    yield device
    device.close()
