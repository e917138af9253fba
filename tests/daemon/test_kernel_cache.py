from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cuda.bindings import nvrtc

from daemon.kernel_cache import KernelCache, kernel_cache
from runtime.decoding.deployment import load_deployment
from runtime.device.cuda.compiler import KernelCompiler, kernel_source
from runtime.device.cuda.driver import CudaDriver
from runtime.executor.kernels.engine import wanted_kernels
from runtime.executor.kernels.launch import SOURCES
from runtime.export import DraftOptions, ExportOptions, export_model
from runtime.options import RuntimeOptions, SpeculationOptions
from tests.eagle_models import write_draft
from tests.references import reference_folder
from tests.runtime.device.cuda.test_clusters import ClusterDriver


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

    monkeypatch.setattr("daemon.kernel_cache.wanted_kernels", wanted)
    opening: Any = lambda: context  # noqa: E731 - one of another type
    folder = tmp_path / "kernels"
    found = kernel_cache(tmp_path / "engine", deployment, opening, folder)
    programs = {(one.file, one.options) for part in asked for one in part}
    assert len(asked) == 2
    assert found == KernelCache(wanted=len(programs), compiled=0)
    assert context.closed == 1
    # One of them is compiled; the name of its entry says all that it depends on.
    file, given = min(programs)
    compiler = KernelCompiler(nvrtc, "sm_90", folder)
    compiler.compile(file, kernel_source(file, SOURCES), given)
    found = kernel_cache(tmp_path / "engine", deployment, opening, folder)
    assert found == KernelCache(wanted=len(programs), compiled=1)
