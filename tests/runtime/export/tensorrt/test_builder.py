import ctypes
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hearth.runtime.export.tensorrt import builder
from tests.runtime.export.tensorrt.fake_builder import FakeBuilder, Layer

Events = list[dict[str, Any]]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    fake = FakeBuilder()
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    return fake


def write_job(folder: Path, **changes: Any) -> str:
    job = {
        "module": "tensorrt",
        "graph": "graph",
        "output": str(folder / "plan"),
        "timing_cache": None,
        "profiles": [{"x": [[1], [2], [4]]}],
        "precision": "float16",
        "version_compatible": False,
        "workspace_bytes": 0,
        "optimization_level": None,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job | changes))
    return str(path)


def run(folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[int, Events]:
    status = builder.main([write_job(folder, **changes)], [])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_plan_is_written_and_described(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    library: FakeBuilder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builder, "gpu_identity", lambda: ("Orin", "8.7"))
    status, events = run(tmp_path, capsys, version_compatible=True, workspace_bytes=99)
    assert status == 0
    assert (tmp_path / "plan").read_bytes() == b"plan"
    assert events[-1]["event"] == "built"
    assert events[-1]["tensorrt_version"] == "8.6.1"
    assert events[-1]["strongly_typed"] is False
    assert (events[-1]["gpu_name"], events[-1]["compute_capability"]) == ("Orin", "8.7")
    assert {"FP16", "OBEY", "no TF32", "COMPATIBLE", ("WORKSPACE", 99)} <= set(library.notes)
    assert ("x", (1,), (2,), (4,)) in library.notes


def test_a_probe_builds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: FakeBuilder
) -> None:
    status, events = run(tmp_path, capsys, probe=["tensorrt", "none"])
    built = {"event": "built", "module": "tensorrt", "tensorrt_version": library.__version__}
    assert (status, events) == (0, [built])


def test_the_first_library_that_is_there_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: FakeBuilder
) -> None:
    assert library.__version__ == "8.6.1"
    assert run(tmp_path, capsys, probe=["no_such", "tensorrt"])[1][-1]["module"] == "tensorrt"
    status, events = run(tmp_path, capsys, probe=["no_such", "nor_this"])
    assert (status, events[-1]["kind"]) == (1, "no_module")
    assert "no_such cannot be imported" in events[-1]["message"]
    assert "nor_this cannot be imported" in events[-1]["message"]
    assert library.notes == []


def test_a_plan_is_opened_to_learn_what_its_steps_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: FakeBuilder
) -> None:
    plan = tmp_path / "plan"
    plan.write_bytes(b"a plan")
    status, events = run(tmp_path, capsys, measure=str(plan))
    assert (status, events) == (0, [{"event": "built", "scratch_bytes": 640}])
    assert library.notes == [("opened", b"a plan")]
    sizes = [64, 6400, 640]
    library.engine = SimpleNamespace(
        num_optimization_profiles=3, get_device_memory_size_for_profile_v2=sizes.__getitem__
    )
    assert run(tmp_path, capsys, measure=str(plan))[1][-1]["scratch_bytes"] == 6400


@pytest.mark.parametrize(
    ("error", "kind"), [("CUDA: out of memory", "out_of_memory"), ("bad magic", "unusable")]
)
def test_a_plan_that_cannot_be_opened_has_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: FakeBuilder, error: str, kind: str
) -> None:
    (tmp_path / "plan").write_bytes(b"a plan")
    library.error = error
    status, events = run(tmp_path, capsys, measure=str(tmp_path / "plan"))
    assert (status, events[-1]["kind"]) == (1, kind)
    assert events[-1]["message"] == f"the plan cannot be opened: {error}"


def test_layers_between_casts_keep_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: FakeBuilder
) -> None:
    library.layers = [
        Layer("MATRIX_MULTIPLY", "x w", "a"),
        Layer("CAST", "a", "wide", "float32"),
        Layer("ELEMENTWISE", "wide wide", "square"),
        Layer("ELEMENTWISE", "one square", "root"),
        Layer("CAST", "root", "narrow", "float16"),
        Layer("ELEMENTWISE", "narrow a", "out"),
    ]
    _, events = run(tmp_path, capsys)
    assert events[-1]["float32_layers"] == 2
    assert [one.precision for one in library.layers] == [
        None, None, "float32", "float32", None, None,
    ]  # fmt: skip
    assert library.layers[2].output_types == ["float32"]


def test_timings_are_kept_and_begun_anew_when_they_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: FakeBuilder
) -> None:
    cache = tmp_path / "deep" / "cache"
    run(tmp_path, capsys, timing_cache=str(cache))
    assert cache.read_bytes() == b"timed"
    library.cache_fits = False
    _, events = run(tmp_path, capsys, timing_cache=str(cache))
    assert "begun anew" in events[0]["message"]
    assert library.notes[-2:] != []
    assert ("cache", b"timed", False) in library.notes


def test_timings_that_cannot_be_kept_cost_no_plan(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    library: FakeBuilder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "cache", tmp_path):
        status, events = run(tmp_path, capsys, timing_cache=str(place))
        assert (status, events[-1]["event"]) == (0, "built")
        assert "cannot be read" in events[0]["message"]
        assert "cannot be kept" in events[1]["message"]
        assert (tmp_path / "plan").read_bytes() == b"plan"
        (tmp_path / "plan").unlink()
    nothing = SimpleNamespace(data=b"", serialize=lambda: None)
    monkeypatch.setattr(library, "create_timing_cache", lambda _: nothing)
    status, events = run(tmp_path, capsys, timing_cache=str(tmp_path / "cache"))
    assert (status, "cannot be kept" in events[0]["message"]) == (0, True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "job.json", "plan"]


def test_a_plan_that_cannot_be_written_is_named_and_leaves_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    library: FakeBuilder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill_the_disk(path: Path, data: memoryview) -> None:
        with path.open("wb") as file:
            file.write(data[:2])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", fill_the_disk)
    status, events = run(tmp_path, capsys)
    assert (status, events[-1]["kind"]) == (1, "unwritable")
    assert "cannot be written: [Errno 28] No space left on device" in events[-1]["message"]
    assert library.notes != []
    assert [one.name for one in tmp_path.iterdir()] == ["job.json"]


FRAGILE = """
import os, sys
from tests.runtime.export.tensorrt.fake_builder import FakeBuilder

class Cache:
    data = b""
    def serialize(self):
        return b"timed"
    def __del__(self):
        os.abort()

class Fragile(FakeBuilder):
    def create_timing_cache(self, data):
        return Cache()

sys.modules[__name__] = Fragile()
"""


def test_a_library_that_dies_when_it_is_taken_apart_has_done_its_job(tmp_path: Path) -> None:
    (tmp_path / "tensorrt.py").write_text(FRAGILE)
    job = write_job(tmp_path, timing_cache=str(tmp_path / "cache"))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[4])])
    command = [sys.executable, builder.__file__, job]
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    assert json.loads(done.stdout.splitlines()[-1])["event"] == "built"
    assert (tmp_path / "cache").read_bytes() == b"timed"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("Attention operation was not supported by a dedicated kernel", "no_attention_kernel"),
        ("CUDA: out of memory", "out_of_memory"),
        ("something else", "build"),
    ],
)
def test_failures_have_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: FakeBuilder, error: str, kind: str
) -> None:
    library.error = error
    status, events = run(tmp_path, capsys)
    assert status == 1
    assert events[0] == {"event": "warning", "message": "hm"}
    assert (events[-1]["event"], events[-1]["kind"]) == ("failed", kind)
    assert error in events[-1]["message"]
    assert not (tmp_path / "plan").exists()


def test_what_cannot_start_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: FakeBuilder
) -> None:
    assert run(tmp_path, capsys, graph="bad")[1][-1]["kind"] == "parse"
    assert run(tmp_path, capsys, precision="bfloat16")[1][-1]["kind"] == "unsupported"
    assert run(tmp_path, capsys, module="no_such_module")[1][-1]["kind"] == "no_module"
    library.starts = False
    assert run(tmp_path, capsys)[1][-1]["kind"] == "no_gpu"


def test_it_needs_nothing_else_of_ours(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"module": "no_such_module"}')
    command = [sys.executable, "-I", builder.__file__, str(tmp_path / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["kind"] == "no_module"
    assert done.stderr == ""


class FakeLibcuda:
    """libcuda as ctypes sees it; `failing` is the call that does not succeed."""

    failing = ""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuDeviceGetName":
                arguments[0].value = b"Orin"
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = {75: 8, 76: 7}[arguments[1]]
            return 100 if name == self.failing else 0

        return call


def test_the_gpu_is_known_without_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibcuda()
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": library}.__getitem__)
    assert builder.gpu_identity() == ("Orin", "8.7")
    for call in ("cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"):
        library.failing = call
        assert builder.gpu_identity() == ("", "")


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert builder.gpu_identity() == ("", "")


def test_steps_of_a_builder_that_might_allocate_in_them_may_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: FakeBuilder
) -> None:
    library.BuilderFlag = SimpleNamespace(
        **vars(FakeBuilder.BuilderFlag), REQUIRE_USER_ALLOCATION="OURS"
    )
    run(tmp_path, capsys)
    assert "OURS" in library.notes


def test_a_runtime_that_does_not_start_has_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: FakeBuilder
) -> None:
    def start(logger: Any) -> None:
        logger.log(library.ILogger.ERROR, "driver is too old")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    (tmp_path / "plan").write_bytes(b"a plan")
    library.Runtime = start  # type: ignore[method-assign] # one that fails
    status, events = run(tmp_path, capsys, measure=str(tmp_path / "plan"))
    assert (status, events[-1]["message"]) == (1, "the runtime cannot start: driver is too old")
