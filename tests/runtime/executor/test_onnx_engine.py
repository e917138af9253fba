import os
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from msgspec import structs

from hearth.runtime.device.device import HostStream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import (
    Binding,
    EngineOptions,
    Initializers,
    IOTensor,
    physical_cores,
)
from hearth.runtime.executor.engine_executor import check_bindings, check_known
from hearth.runtime.executor.onnx_engine import (
    BOUNDED_SPIN_SINCE,
    SHORT_SPIN_US,
    OnnxEngine,
    add_initializers,
    session_options,
)
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.tensors.registry import TensorRegistry, TensorSpec
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.executor.fake_engine import host_binding

STREAM = HostStream()
CLASSIC = structs.replace(simulated_config(), backend="onnxruntime", dialect="classic")
NATIVE = structs.replace(CLASSIC, dialect="native")
ADD = """
<ir_version: 8, opset_import: ["" : 17]>
add (float[N] x, float[1] offset) => (float[N] y) { y = Add(x, offset) }
"""
SCATTER = """
<ir_version: 11, opset_import: ["" : 24]>
scatter (float[B, 1, C, 2] cache, float[B, 1, S, 2] new, int64[B] start)
=> (float[B, 1, C, 2] present) { present = TensorScatter <axis = -2> (cache, new, start) }
"""
COPIED = "in-place optimization not activated"
needs_native = pytest.mark.skipif(
    tuple(map(int, ort.__version__.split(".")[:2])) < (1, 24), reason="reads opset 23 at most"
)


def _engine(folder: Path, text: str, options: EngineOptions | None = None) -> OnnxEngine:
    onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
    config = NATIVE if "24" in text else CLASSIC
    return OnnxEngine.open(folder, config, options or EngineOptions(threads=1))


def _add_bindings() -> list[Binding]:
    return [
        host_binding("x", "input", np.arange(3, dtype=np.float32)),
        host_binding("offset", "input", np.ones(1, np.float32)),
        host_binding("y", "output", np.zeros(3, np.float32)),
    ]


def test_a_library_that_is_too_old_is_told_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "__version__", "1.23.2")
    with pytest.raises(HearthError, match=r"1\.24 or newer, this is 1\.23\.2") as caught:
        OnnxEngine.open(tmp_path, NATIVE, EngineOptions())
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "dialect")


def test_bindings_are_described(tmp_path: Path) -> None:
    engine = _engine(tmp_path, ADD)
    assert [(one.name, one.direction, one.shape) for one in engine.io_tensors] == [
        ("x", "input", ("N",)),
        ("offset", "input", (1,)),
        ("y", "output", ("N",)),
    ]
    assert {one.dtype for one in engine.io_tensors} == {np.dtype(np.float32)}


def test_a_run_writes_into_the_bound_array(tmp_path: Path) -> None:
    bindings = _add_bindings()
    _engine(tmp_path, ADD, EngineOptions(threads=0, spin=True)).run(bindings, STREAM)
    assert bindings[2].tensor.array.tolist() == [1, 2, 3]


def test_a_captured_run_sees_what_its_arrays_hold_now(tmp_path: Path) -> None:
    bindings = _add_bindings()
    run = _engine(tmp_path, ADD).capture(bindings, STREAM)
    addresses = {value.data_ptr() for value in run.values}
    assert addresses == {one.tensor.array.ctypes.data for one in bindings}
    run.launch(STREAM)
    bindings[0].tensor.array[:] = 10
    run.launch(STREAM)
    assert bindings[2].tensor.array.tolist() == [11, 11, 11]
    run.close()
    assert run.values == []


def test_a_step_that_the_engine_refuses_is_our_error(tmp_path: Path) -> None:
    bindings = _add_bindings()
    bindings[1] = host_binding("offset", "input", np.ones(2, np.float32))
    with pytest.raises(HearthError) as caught:
        _engine(tmp_path, ADD).run(bindings, STREAM)
    assert caught.value.code == "executor_failed"
    assert "offset" not in caught.value.message


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("arena.cc: Failed to allocate memory for a buffer")]
)
def test_memory_that_a_step_or_a_session_lacks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise error

    run = _engine(tmp_path, ADD).capture(_add_bindings(), STREAM)
    monkeypatch.setattr(run, "_session", SimpleNamespace(run_with_iobinding=fail))
    with pytest.raises(HearthError, match="the machine has no memory") as caught:
        run.launch(STREAM)
    assert caught.value.code == "out_of_memory"
    monkeypatch.setattr(ort, "InferenceSession", fail)
    with pytest.raises(HearthError, match="does not fit into memory") as caught:
        _engine(tmp_path, ADD)
    assert caught.value.code == "out_of_memory"


def _scatter_bindings(present: np.ndarray | None = None) -> list[Binding]:
    cache = np.zeros((2, 1, 4, 2), np.float32)
    return [
        host_binding("cache", "input", cache),
        host_binding("new", "input", np.ones((2, 1, 1, 2), np.float32)),
        host_binding("start", "input", np.array([1, 3])),
        host_binding("present", "output", cache if present is None else present),
    ]


@needs_native
def test_an_output_bound_to_its_input_is_written_in_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bindings = _scatter_bindings()
    engine = _engine(tmp_path, SCATTER)
    engine.run(bindings, STREAM)
    run = engine.capture(bindings, STREAM)
    bindings[2].tensor.array[:] = [2, 0]
    run.launch(STREAM)
    assert bindings[0].tensor.array[:, 0, :, 0].tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]
    assert COPIED not in capfd.readouterr().err


def test_bindings_of_one_address_share_one_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = ort.OrtValue.ortvalue_from_numpy

    def note(array: np.ndarray) -> ort.OrtValue:
        made.append(array.ctypes.data)
        return make(array)

    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_numpy", note)
    bindings = _add_bindings()
    bindings[2] = bindings[0]._replace(name="y", direction="output")
    _engine(tmp_path, ADD).run(bindings, STREAM)
    assert made == [bindings[0].tensor.array.ctypes.data, bindings[1].tensor.array.ctypes.data]


@needs_native
def test_an_output_of_its_own_is_a_copy_and_the_log_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    present = np.zeros((2, 1, 4, 2), np.float32)
    _engine(tmp_path, SCATTER).run(_scatter_bindings(present), STREAM)
    assert present.any()
    assert COPIED in capfd.readouterr().err


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "truncated", "no such op"])
def test_a_broken_model_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.onnx"
    whole = onnx.parser.parse_model(ADD).SerializeToString()
    unknown = ADD.replace("= Add", "= NoSuchOperation")
    content = {
        "empty": b"",
        "garbage": b"\x00garbage" * 40,
        "truncated": whole[: len(whole) // 2],
        "no such op": onnx.parser.parse_model(unknown).SerializeToString(),
    }
    if damage != "missing":
        path.write_bytes(content[damage])
    with pytest.raises(HearthError) as caught:
        OnnxEngine.open(tmp_path, CLASSIC, EngineOptions())
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", "model.onnx")
    assert caught.value.message.endswith("export the model again")


@needs_native
@pytest.mark.parametrize("how", ["link", "dots"])
def test_data_outside_the_folder_are_refused_and_that_is_said(tmp_path: Path, how: str) -> None:
    model, folder = onnx.parser.parse_model(ADD), tmp_path / "engine"
    folder.mkdir()
    offset = onnx.numpy_helper.from_array(np.ones(1024, np.float32), "offset")
    del model.graph.input[1]
    model.graph.initializer.append(offset)
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    (folder / "model.onnx.data").rename(tmp_path / "outside.data")
    if how == "link":
        (folder / "model.onnx.data").symlink_to(tmp_path / "outside.data")
    else:
        graph = onnx.load(folder / "model.onnx", load_external_data=False)
        (place,) = (
            one for one in graph.graph.initializer[0].external_data if one.key == "location"
        )
        place.value = "../outside.data"
        (folder / "model.onnx").write_bytes(graph.SerializeToString())
    with pytest.raises(HearthError, match=r"symbolic link or by \.\.") as caught:
        OnnxEngine.open(folder, CLASSIC, EngineOptions(threads=1))
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", "model.onnx")


def test_a_model_beyond_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ort, "InferenceSession", exhausted)
    with pytest.raises(HearthError) as caught:
        OnnxEngine.open(tmp_path, CLASSIC, EngineOptions())
    assert (caught.value.code, caught.value.field) == ("out_of_memory", "model.onnx")


def test_a_type_that_is_not_served_is_named(tmp_path: Path) -> None:
    text = ADD.replace("float[N] x, float[1] offset", "double[N] x").replace("float", "double")
    with pytest.raises(HearthError, match="binding x has a type") as caught:
        _engine(tmp_path, text.replace("Add(x, offset)", "Abs(x)"))
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "x")


def test_session_settings() -> None:
    made = session_options(EngineOptions(threads=3))
    assert made.intra_op_num_threads == 3
    bounded = tuple(map(int, ort.__version__.split(".")[:2])) >= BOUNDED_SPIN_SINCE
    allowed = made.get_session_config_entry("session.intra_op.allow_spinning")
    assert allowed == ("1" if bounded else "0")
    if bounded:
        assert made.get_session_config_entry("session.intra_op.spin_duration_us") == SHORT_SPIN_US
    assert made.get_session_config_entry("session.force_spinning_stop") == "1"
    assert made.get_session_config_entry("session.qdq_matmulnbits_accuracy_level") == "4"
    spinning = session_options(EngineOptions(spin=True))
    assert spinning.intra_op_num_threads >= 1
    assert spinning.get_session_config_entry("session.intra_op.allow_spinning") == "1"


def test_it_allocates_its_own_scratch_memory(tmp_path: Path) -> None:
    engine = _engine(tmp_path, ADD)
    assert engine.required_context_memory == 0
    engine.set_context_memory(Tensor.zeros("none", (0,), np.dtype(np.float32)))
    engine.use_profile(1, STREAM)
    engine.close()


def test_an_onnx_runtime_that_reads_no_other_weights_says_so() -> None:
    with Path(__file__).open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as file:
        given = Initializers({"weights.safetensors": file}, {})
        with pytest.raises(HearthError) as caught:
            add_initializers(SimpleNamespace(), given)
        given.release_pages()
        assert bytes(file) == Path(__file__).read_bytes()
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "weights")


FLOAT = np.dtype(np.float32)
FITTING = IOTensor("x", "input", FLOAT, ("B", None, 8))


def _registry() -> TensorRegistry:
    registry = TensorRegistry()
    registry.add(TensorSpec("x", "input", FLOAT, ("batch", "seq_len", 8)))
    return registry


def test_a_fitting_engine_passes_with_bindings_of_its_own() -> None:
    check_bindings([FITTING, IOTensor("rope_cos", "input", FLOAT, (64, 4))], _registry())


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ([], "is missing"),
        ([FITTING._replace(direction="output")], "is an output"),
        ([FITTING._replace(dtype=np.dtype(np.float16))], "is float16"),
        ([FITTING._replace(shape=("B", None, 9))], "has shape"),
        ([FITTING._replace(shape=("B", 8))], "has shape"),
    ],
)
def test_a_binding_that_differs_is_named(engine: list[IOTensor], words: str) -> None:
    with pytest.raises(HearthError, match=f"binding x {words}") as caught:
        check_bindings(engine, _registry())
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "x")


def test_a_binding_that_nobody_would_bind_is_refused() -> None:
    rope, other = (FITTING._replace(name=name) for name in ("rope_cos", "layers.0/qkv"))
    with pytest.raises(HearthError, match="is unknown to this runtime") as caught:
        check_known([FITTING, rope, other], _registry())
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "layers.0/qkv")


def _topology(folder: Path, siblings: dict[int, str]) -> Path:
    for cpu, text in siblings.items():
        (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(text)
    return folder


def test_hyper_threads_of_one_core_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    topology = _topology(tmp_path, {0: "0,2\n", 1: "1,3\n", 2: "0,2\n", 3: "1,3\n"})
    assert physical_cores(topology) == 2


def test_only_allowed_processors_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2})
    assert physical_cores(_topology(tmp_path, {0: "0", 2: "2"})) == 1


def test_without_a_topology_every_processor_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert physical_cores(tmp_path) == 3
