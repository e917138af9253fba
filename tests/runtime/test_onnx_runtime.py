import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.onnx_runtime import CUDA_PROVIDER, check_provider, check_version
from tests.references import reference_folder
from tests.runtime.conftest import EngineFolders

WITHOUT = """
import sys
from importlib import metadata

class NoEngine:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            raise ModuleNotFoundError("No module named 'onnxruntime'", name=name)

def absent(name):
    raise metadata.PackageNotFoundError(name)

sys.meta_path.insert(0, NoEngine())
metadata.version = absent
from hearth.daemon.cli import main
main()
"""


@pytest.mark.parametrize("version", ["1.23.2", "1.9.0", "0.24.1"])
def test_an_older_library_is_told_what_to_do_with_a_native_engine(version: str) -> None:
    check_version("classic", "cpu", version)
    with pytest.raises(HearthError, match="classic dialect") as caught:
        check_version("native", "cpu", version)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "dialect")


@pytest.mark.parametrize("version", ["1.24.0", "1.31.1", "2.0.0", "1.31.0.dev1"])
def test_newer_libraries_serve_both_dialects(version: str) -> None:
    check_version("native", "cpu", version)


@pytest.mark.parametrize("version", ["1.23.0", "1.26.0", "1.29.0"])
@pytest.mark.parametrize("dialect", ["native", "classic"])
def test_a_cuda_provider_without_what_a_graph_needs_is_refused(dialect: str, version: str) -> None:
    with pytest.raises(HearthError, match=rf"1\.30 or newer, this is {version}") as caught:
        check_version(dialect, "cuda", version)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "device")
    check_version(dialect, "cuda", "1.30.0")


def test_a_build_without_cuda_is_told_what_has_it() -> None:
    check_provider(SimpleNamespace(get_available_providers=lambda: [CUDA_PROVIDER]))
    plain = SimpleNamespace(__version__="1.31.1", get_available_providers=list)
    with pytest.raises(HearthError, match=r"\(1\.31\.1\) has no CUDA: .*onnxruntime-gpu>="):
        check_provider(plain)


@pytest.mark.parametrize("command", ["check", "generate", "export"])
def test_without_an_engine_library_one_line_says_what_to_install(
    command: str, tmp_path: Path, engine_folders: EngineFolders
) -> None:
    folder = engine_folders("qwen3", "classic")
    arguments = {
        "check": ["--engine", str(folder)],
        "generate": [str(folder), "--ids", "1,2"],
        "export": [str(reference_folder("qwen3")), str(tmp_path / "engine")],
    }[command]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("hearth: ")
    assert done.stderr.count("\n") == 1
    assert "there is no engine library" in done.stderr
    assert f"{sys.executable} -m pip install 'onnxruntime>=1.23'" in done.stderr
