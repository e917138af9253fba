"""What ONNX Runtime puts on the host of a graph for CUDA must be arithmetic with shapes alone."""

from pathlib import Path
from typing import Any, cast

import onnx_ir as ir
import onnxruntime as ort
import pytest
from msgspec import structs

from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.device import HostStream
from hearth.runtime.engine_folder import DRAFT_FOLDER, MODEL_FILE
from hearth.runtime.errors import Code, HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.onnx_cuda_engine import ON_THE_HOST, open_session, step_error
from hearth.runtime.executor.simulated_engine import simulated_config
from tests.runtime.export.trees import export_with_draft

SMALL = 100
"""Elements of a constant that does not keep its reader on the device."""
TAKEN_FROM_THE_HOST = {
    "Slice": {1, 2, 3, 4},
    "Expand": {1},
    "Reshape": {1},
    "Tile": {1},
    "Pad": {1},
    "Split": {1},
    "Unsqueeze": {1},
    "Squeeze": {1},
    "Range": {0, 1, 2},
}
"""Inputs that the CUDA kernels read from host memory."""


def host_nodes(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that ONNX Runtime prefers to run on the host, as `GetCpuPreferredNodes` decides.

    Those are the ones that read a shape, or what was made of shapes, and else constants only.
    """
    found: list[ir.Node] = []
    there: set[ir.Value] = set()
    for node in graph:
        if node.op_type == "Shape":
            there.update(node.outputs)
        elif _reads_the_host_alone(node, there):
            there.update(node.outputs)
            found.append(node)
    return found


def _reads_the_host_alone(node: ir.Node, there: set[ir.Value]) -> bool:
    taken = TAKEN_FROM_THE_HOST.get(node.op_type, set())
    given = [(place, value) for place, value in enumerate(node.inputs) if value is not None]
    shapes = [place for place, value in given if value in there]
    others = [value for _, value in given if value not in there]
    constant = all(
        value.is_initializer() and value.const_value is not None and value.const_value.size < SMALL
        for value in others
    )
    return bool(shapes) and constant and not taken.intersection(shapes)


@pytest.mark.parametrize("part", [".", DRAFT_FOLDER])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"dtype": "float16", "verify": "chains"},
    ],
    ids=str,
)
def test_an_engine_with_a_draft_is_accepted(
    tmp_path: Path, part: str, options: dict[str, Any]
) -> None:
    folder = export_with_draft(
        "qwen3", tmp_path, backend="onnxruntime", device="cuda", dialect="native", **options
    )
    nodes = host_nodes(ir.load(folder / part / MODEL_FILE).graph)
    assert nodes
    assert [node.name for node in nodes if node.op_type not in ON_THE_HOST] == []


def test_a_library_that_is_too_old_is_told_before_anything_is_asked_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As JetPack 6 has it, without what loads the libraries of other packages.
    monkeypatch.setattr(ort, "__version__", "1.23.0")
    monkeypatch.delattr(ort, "preload_dlls", raising=False)
    config = structs.replace(simulated_config(), backend="onnxruntime", device="cuda")
    nobody = cast("CudaDevice", None)
    with pytest.raises(HearthError, match=r"1\.30 or newer, this is 1\.23\.0") as caught:
        open_session(tmp_path, config, EngineOptions(), nobody)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "device")


@pytest.mark.parametrize(
    ("stream_code", "code"),
    [("executor_failed", "out_of_memory"), ("device_lost", "device_lost")],
)
def test_a_stream_that_cannot_be_waited_for_does_not_hide_the_error(
    stream_code: Code, code: str
) -> None:
    class Captured(HostStream):
        def synchronize(self) -> None:
            raise HearthError(stream_code, "cuStreamSynchronize failed")

    error = RuntimeError("Failed to allocate memory for requested buffer")
    assert step_error(error, Captured()).code == code
