import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from cuda.bindings import nvrtc

from hearth.daemon.kernel_cache import KernelCache, compile_kernels, kernel_cache, targets_of
from hearth.runtime.device.cuda.compiler import KernelCompiler, kernel_source
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.kernels.engine import wanted_kernels
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.generation.deployment import load_deployment
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from tests.eagle_models import write_draft
from tests.references import reference_folder
from tests.runtime.device.cuda.test_driver import ClusterDriver
from tests.runtime.executor.kernels.model_shapes import GPUS


class FakeContext:
    def __init__(self) -> None:
        self.closed = 0
        self.driver = CudaDriver(ClusterDriver({8: 15}))
        self.properties = SimpleNamespace(
            compute_capability=(9, 0), multiprocessors=132, architecture="sm_90"
        )

    def attribute(self, _name: str) -> int:
        return 227 << 10

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    options = ExportOptions(
        backend="kernels", device="cuda", dtype="float16", capacity=64, max_batch=1
    )
    export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    return tmp_path / "engine"


class Compiler:
    """Compiles nothing, but keeps what it is given in the folder."""

    made: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, _api: Any, architecture: str, folder: Path) -> None:
        self.architecture, self.folder = architecture, folder

    def _path(self, source: str) -> Path:
        text = f"{self.architecture}{source}"
        return self.folder / hashlib.sha256(text.encode()).hexdigest()

    def has(self, _file: str, source: str, _options: tuple[str, ...]) -> bool:
        return self._path(source).exists()

    def compile(self, file: str, source: str, _options: tuple[str, ...]) -> bytes:
        self.made.append((self.architecture, file))
        if self.folder.is_dir():
            self._path(source).touch()
        return b""


def test_what_is_missing_is_compiled_without_a_gpu(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.daemon.kernel_cache.KernelCompiler", Compiler)
    monkeypatch.setattr(Compiler, "made", [])
    folder, heard = tmp_path / "kernels", list[tuple[int, int]]()
    folder.mkdir()
    deployment = load_deployment(engine, RuntimeOptions())

    def told(_stage: str, done: int, total: int) -> None:
        heard.append((done, total))

    found = compile_kernels(engine, deployment, targets_of("8.7:16"), told, folder)
    assert found.compiled == found.wanted == len(Compiler.made) == len(heard)
    assert heard[-1] == (found.wanted, found.wanted)
    assert {architecture for architecture, _ in Compiler.made} == {"sm_87"}
    again = compile_kernels(engine, deployment, targets_of("8.7:16"), told, folder)
    assert again == found
    assert len(Compiler.made) == found.wanted
    # Boards of one kind share most of what they want.
    more = compile_kernels(engine, deployment, targets_of("8.7"), told, folder)
    assert found.wanted < more.wanted < 4 * found.wanted


def test_a_cache_folder_that_cannot_be_written_is_said(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.daemon.kernel_cache.KernelCompiler", Compiler)
    deployment = load_deployment(engine, RuntimeOptions())
    with pytest.raises(HearthError, match="cannot be written") as caught:
        compile_kernels(
            engine, deployment, targets_of("9.0:132"), lambda *_: None, tmp_path / "none"
        )
    assert caught.value.field == "HEARTH_CACHE"


def test_facts_of_a_gpu_follow_from_its_compute_capability() -> None:
    for name, text in {"H200": "9.0:132", "Orin": "8.7:16", "RTX 3090": "8.6:82"}.items():
        assert [one.facts for one in targets_of(text)] == [GPUS[name]]
    assert [one.facts.multiprocessors for one in targets_of("8.7")] == [4, 8, 14, 16]
    assert targets_of("12.1")[0].architecture == "sm_121"


@pytest.mark.parametrize("text", ["", "7.5:40", "9.0", "9:132", "9.0:", "9.0:0", "8.7:x", "a.b:1"])
def test_a_gpu_that_nobody_knows_is_refused(text: str) -> None:
    with pytest.raises(HearthError) as caught:
        targets_of(text)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "compile_for")


def test_what_a_base_and_its_draft_want_is_looked_for(tmp_path: Path, monkeypatch: Any) -> None:
    model = reference_folder("qwen3")
    draft = DraftOptions(folder=write_draft(model, tmp_path / "draft"))
    options = ExportOptions(
        backend="kernels", device="cuda", dtype="float16", capacity=64, max_batch=2, draft=draft
    )
    export_model(model, tmp_path / "engine", options)
    speculation = SpeculationOptions(method="eagle")
    deployment = load_deployment(tmp_path / "engine", RuntimeOptions(speculation=speculation))
    asked, context = [], FakeContext()

    def wanted(*given: Any) -> Any:
        asked.append(wanted_kernels(*given))
        return asked[-1]

    monkeypatch.setattr("hearth.daemon.kernel_cache.wanted_kernels", wanted)
    opening: Any = lambda: context  # noqa: E731 - one of another type
    folder = tmp_path / "kernels"
    found = kernel_cache(tmp_path / "engine", deployment, opening, folder)
    programs = list({one.program: None for part in asked for one in part})
    assert len(asked) == 2
    assert found == KernelCache(wanted=len(programs), compiled=0)
    assert context.closed == 1
    # One of them is compiled; the name of its entry says all that it depends on.
    file, config, _ = min(programs, key=str)
    compiler = KernelCompiler(nvrtc, "sm_90", folder)
    compiler.compile(file, kernel_source(file, config), ())
    found = kernel_cache(tmp_path / "engine", deployment, opening, folder)
    assert found == KernelCache(wanted=len(programs), compiled=1)
