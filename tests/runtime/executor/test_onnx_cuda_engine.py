"""ONNX Runtime on a GPU against stored float32 logits and itself on the CPU.

What it puts on the host of a graph for CUDA must be arithmetic with shapes alone.
"""

from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, cast

import ml_dtypes  # noqa: F401 - names bfloat16 for NumPy
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.config import load_config
from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.device.device import HostStream
from hearth.runtime.engine_folder import DRAFT_FOLDER, MODEL_FILE
from hearth.runtime.errors import Code, HearthError
from hearth.runtime.executor.engine import Binding, CapturedRun, EngineOptions, IOTensor
from hearth.runtime.executor.onnx_cuda_engine import (
    ON_THE_HOST,
    OnnxCudaEngine,
    open_session,
    provider_options,
    session_options,
    step_error,
)
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.options import TargetType
from hearth.runtime.onnx_runtime import CUDA_PROVIDER
from hearth.runtime.tensors.tensor import Tensor
from tests.references import NAMES, reference_folder, reference_logits
from tests.references.images import stored_logits
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.image_rows import CAPACITY, ROWS, logits_of
from tests.runtime.export.trees import export_with_draft
from tests.vision_models import FAMILIES, Family, write_vision_model

Array = NDArray[Any]
LONGEST_STEP = 64


class CudaGraphDriver(GraphDriver):
    """Host arrays are the truth of eager steps; captured ones leave the caches on the device."""

    def __init__(self, folder: Path, batch: int, capacity: int, device: CudaDevice) -> None:
        self._device = device
        self._batch, self._capacity = batch, capacity
        self._tensors: dict[str, Tensor] = {}
        super().__init__(folder, batch, capacity)

    def _open(self, folder: Path) -> None:
        self.engine = OnnxCudaEngine.open(
            folder, load_config(folder), EngineOptions(), self._device
        )

    def _run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        rows, steps = feeds["attention_pos_id"].shape
        selected = feeds["last_token_ids"].shape[1]
        bindings = self.bindings(rows, steps, selected)
        self._upload(feeds | self.caches)
        self.engine.run(bindings, self._device.stream)
        for name, kept in self.caches.items():
            kept[:] = self._read(name, kept.shape)
        logits = self._read("logits", (rows, selected, self.config.vocab_size))
        return {"logits": logits}

    def bindings(self, rows: int, steps: int, selected: int) -> tuple[Binding, ...]:
        """The step of these sizes, over buffers that stay where they are."""
        sizes = {"batch": rows, "step": steps, "selected": selected}
        return tuple(
            Binding(io.name, io.direction, self._tensor(io), self._shape(io, sizes))
            for io in self.engine.io_tensors
        )

    def capture(self, rows: int) -> CapturedRun:
        """A decode step of so many rows; all caches must have that many."""
        self._upload(self.caches)
        self.filled = self.filled[:rows]
        graph = self.engine.capture(self.bindings(rows, 1, 1), self._device.stream)
        # The step ran on the way, with the inputs of whatever was run before.
        self._device.stream.synchronize()
        self._upload(self.caches)
        return graph

    def replay(self, graph: CapturedRun, tokens: list[int]) -> Array:
        """Feed each row one token; logits [rows, V]."""
        index = self.filled.astype(np.int64)
        self._upload(
            {
                "inputs_embeds": self.table[np.array(tokens)].astype(self.config.dtype),
                "kvcache_start_index": index,
                "attention_pos_id": index,
                "last_token_ids": np.zeros_like(index),
            }
        )
        graph.launch(self._device.stream)
        self.filled = self.filled + 1
        return self._read("logits", (len(tokens), self.config.vocab_size))

    def close(self) -> None:
        """Free the session; buffers belong to the device."""
        self.engine.close()

    def _shape(self, io: IOTensor, sizes: dict[str, int]) -> tuple[int, ...]:
        fixed = {"capacity": self._capacity, "positions": self.rope["rope_cos"].shape[-2]}
        return tuple(
            size if isinstance(size, int) else (sizes | fixed)[str(size)] for size in io.shape
        )

    def _tensor(self, io: IOTensor) -> Tensor:
        name = io.name.removeprefix("present_")
        if name not in self._tensors:
            most = {"batch": self._batch, "step": LONGEST_STEP, "selected": LONGEST_STEP}
            self._tensors[name] = self._device.zeros(name, self._shape(io, most), io.dtype)
            if name in self.rope:
                self._upload({name: self.rope[name]})
        return self._tensors[name]

    def _upload(self, arrays: dict[str, Array]) -> None:
        self._device.stream.synchronize()
        for name, array in arrays.items():
            dense = np.ascontiguousarray(array)
            if name in self._tensors:
                self._device.context.driver.call(
                    "cuMemcpyHtoD", self._tensors[name].address, dense.ctypes.data, dense.nbytes
                )

    def _read(self, name: str, shape: tuple[int, ...]) -> Array:
        tensor = self._tensors[name]
        assert prod(shape) * tensor.dtype.itemsize <= tensor.nbytes
        part = Tensor.on_device(name, tensor.address, shape, tensor.dtype, tensor.owner)
        return self._device.read(part)


gpu_test = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        CUDA_PROVIDER not in ort.get_available_providers(), reason="needs onnxruntime-gpu"
    ),
]
TOLERANCES = {"float32": 2e-4, "float16": 0.1, "bfloat16": 0.8}
"""Largest error of a logit; logits have a standard deviation of 1.5."""
POSITIONS = 200
CUDA = ExportOptions(backend="onnxruntime", device="cuda", dtype="float16")
Folder = Callable[[str, ExportOptions], Path]


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    pytest.importorskip("torch", reason="brings cuDNN and cuBLAS")
    device = open_cuda_device()
    yield device
    device.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    @cache
    def exported(name: str, options: ExportOptions) -> Path:
        target = tmp_path_factory.mktemp("engines") / name
        export_model(reference_folder(name), target, options)
        return target

    return exported


class TestOnTheGpu:
    pytestmark = gpu_test

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_logits_agree_in_a_ragged_batch(
        self, device: CudaDevice, folder: Folder, name: str, dtype: str
    ) -> None:
        options = structs.replace(CUDA, dtype=dtype)
        rows = reference_logits(name)
        driver = CudaGraphDriver(folder(name, options), len(rows), 32, device)
        for row, logits in zip(rows, run_rows(driver, rows, 5), strict=True):
            np.testing.assert_allclose(logits, row.logits, atol=TOLERANCES[dtype], rtol=0)
        driver.close()

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_rows_with_and_without_an_image_agree(
        self, device: CudaDevice, tmp_path: Path, family: Family, dtype: TargetType
    ) -> None:
        options = structs.replace(CUDA, dtype=dtype)
        export_model(write_vision_model(tmp_path / "m", family), tmp_path / "engine", options)
        for chunk in (1, 5):
            driver = CudaGraphDriver(tmp_path / "engine", ROWS, CAPACITY, device)
            seen = logits_of(driver, family, chunk)
            for logits, expected in zip(seen, stored_logits(family), strict=True):
                tolerance = TOLERANCES[dtype] * max(1, expected.std() / 1.5)
                np.testing.assert_allclose(logits, expected, atol=tolerance, rtol=0)
            driver.close()

    @pytest.mark.parametrize("batch", [1, 2, 8])
    def test_one_kept_step_serves_a_growing_sequence(
        self, device: CudaDevice, folder: Folder, batch: int
    ) -> None:
        """Rows start at different lengths and are fed the CPU's greedy tokens."""
        slots = POSITIONS + 56
        cpu = GraphDriver(folder("qwen3", ExportOptions()), batch, slots)
        gpu = CudaGraphDriver(folder("qwen3", CUDA), batch, slots, device)
        prompts = [[1 + (7 * row + i) % 50 for i in range(3 + 2 * row)] for row in range(batch)]
        ours, theirs = gpu.step(prompts), cpu.step(prompts)
        graph = gpu.capture(batch)
        for _ in range(POSITIONS):
            best = [np.argsort(logits[-1])[-2:] for logits in theirs]
            for row, (second, first) in enumerate(best):
                picked = int(np.argmax(ours[row][-1]))
                gap = theirs[row][-1][first] - theirs[row][-1][second]
                assert picked == first or gap < TOLERANCES["float16"]
            tokens = [int(first) for _, first in best]
            ours = [row[None] for row in gpu.replay(graph, tokens)]
            theirs = cpu.step([[token] for token in tokens])
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one, other, atol=TOLERANCES["float16"], rtol=0)
        graph.close()
        gpu.close()

    def test_replays_outlive_other_captures_and_prefills(
        self, device: CudaDevice, folder: Folder
    ) -> None:
        """A step of other sizes between two launches changes nothing."""
        driver = CudaGraphDriver(folder("qwen3", CUDA), 8, 256, device)
        driver.step([[1 + row, 2, 3 + row] for row in range(8)])
        graph = driver.capture(8)
        before, tokens = driver.filled.copy(), list(range(1, 9))
        wanted = driver.replay(graph, tokens)
        for steps in (64, 3, 17):
            driver.engine.run(driver.bindings(5, steps, 1), device.stream)
        others = [
            driver.engine.capture(driver.bindings(rows, 1, 1), device.stream) for rows in (1, 2, 4)
        ]
        for other in (*others, *others):
            other.launch(device.stream)
        # The steps above wrote to the rows' newest slots; a prefill puts them right again.
        driver.filled = np.zeros(8, np.int64)
        driver.caches = {name: np.zeros_like(one) for name, one in driver.caches.items()}
        driver.step([[1 + row, 2, 3 + row] for row in range(8)])
        assert driver.filled.tolist() == before.tolist()
        np.testing.assert_array_equal(driver.replay(graph, tokens), wanted)
        for one in (graph, *others):
            one.close()
        driver.close()

    def test_another_stream_is_refused(self, device: CudaDevice, folder: Folder) -> None:
        driver = CudaGraphDriver(folder("qwen3", CUDA), 1, 64, device)
        with pytest.raises(HearthError, match="stream that it was opened with"):
            driver.engine.run(driver.bindings(1, 1, 1), HostStream())
        driver.close()


def test_the_provider_gets_our_stream() -> None:
    assert provider_options(1234)["user_compute_stream"] == "1234"


def test_a_session_keeps_no_pattern_for_every_shape() -> None:
    assert not session_options(EngineOptions()).enable_mem_pattern


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
