"""ONNX Runtime on a GPU against stored float32 logits, and against itself on the CPU."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from msgspec import structs

from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.device.device import HostStream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.onnx_cuda_engine import provider_options, session_options
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.options import TargetType
from hearth.runtime.onnx_runtime import CUDA_PROVIDER
from tests.references import NAMES, reference_folder, reference_logits
from tests.references.images import stored_logits
from tests.runtime.executor.cuda_graph_driver import CudaGraphDriver
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.image_rows import CAPACITY, ROWS, logits_of
from tests.vision_models import FAMILIES, Family, write_vision_model

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
