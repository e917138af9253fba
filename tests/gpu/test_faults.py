"""What a GPU that fails does to a batch, to the daemon and to those who wait."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hearth.daemon.own_daemon import own_daemon
from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.generation.budget import budgets_of
from hearth.runtime.generation.deployment import DeploymentConfig, load_deployment
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GenerationRequest
from hearth_client import Client
from hearth_client.errors import HearthClientError
from tests.gpu.conftest import EngineFolder
from tests.gpu.near_ties import greedy_row
from tests.gpu.poison import HOOK

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
ENGINE, SPACIOUS = "ort-fp16", "ort-fp32"
SPARE = 4 << 20


@pytest.mark.whole_gpu
def test_a_chunk_without_memory_fails_its_rows_and_the_next_ones_run(
    engine_folder: EngineFolder,
) -> None:
    from hearth.runtime.device.cuda.cuda_device import open_cuda_device  # noqa: PLC0415 - an extra

    # Attention writes its scores down: more than an arena has to spare.
    runtime = LLMInferenceRuntime.open(engine_folder(SPACIOUS), RuntimeOptions())
    other = open_cuda_device()
    try:
        free, _ = other.context.memory()
        other.memory.zeros("everything", (free - SPARE,), np.dtype(np.uint8))
        rows = [greedy_row([7] * 400, 4, ignore_eos=True) for _ in range(8)]
        answers = runtime.handle_request(GenerationRequest(rows=rows)).rows
        assert {row.error for row in answers} == {"out_of_memory"}
    finally:
        other.close()
    answers = runtime.handle_request(GenerationRequest(rows=rows)).rows
    assert [len(row.token_ids) for row in answers] == [4] * 8
    runtime.close()


@pytest.mark.whole_gpu
def test_more_cache_than_memory_is_refused_when_it_is_loaded(engine_folder: EngineFolder) -> None:
    folder = engine_folder(ENGINE)
    config = structs.replace(load_config(folder), max_supported_batch_size=200_000)
    with pytest.raises(HearthError) as caught:
        LLMInferenceRuntime.create(DeploymentConfig(config), folder, EngineOptions())
    assert caught.value.code == "out_of_memory"


@pytest.mark.whole_gpu
def test_limits_that_nobody_asked_for_fit_into_what_is_free(engine_folder: EngineFolder) -> None:
    from hearth.runtime.device.cuda.cuda_device import open_cuda_device  # noqa: PLC0415 - an extra

    folder = engine_folder(ENGINE)
    needed = []
    for count in (1, 8):
        deployment = load_deployment(folder, RuntimeOptions(max_batch=count))
        budget = budgets_of(deployment, 1 << 50, 1 << 50)[0]
        needed.append(budget.needed * 8 // 7 - budget.parts["context"])
    other = open_cuda_device()
    try:
        free = other.free_memory()
        assert free is not None, "an integrated GPU: all but this test goes for it as well"
        taken = free - sum(needed) // 2
        other.memory.zeros("all but enough for one row", (taken,), np.dtype(np.uint8))
        with closing(LLMInferenceRuntime.open(folder, RuntimeOptions())) as runtime:
            assert 1 <= runtime.max_batch < 8
            assert "8 rows of 1024 tokens would take" in runtime.chosen
            runtime.capture(range(1, runtime.max_batch + 1))
            rows = [greedy_row([7] * 400, 4, ignore_eos=True)] * runtime.max_batch
            answers = runtime.handle_request(GenerationRequest(rows=rows)).rows
            assert [len(row.token_ids) for row in answers] == [4] * runtime.max_batch
    finally:
        other.close()


def test_a_lost_device_ends_the_process_answers_everybody_and_is_replaced(
    engine_folder: EngineFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK.format(marker=str(tmp_path / "poisoned")))
    path = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    def ask(number: int) -> str:
        with Client(daemon.socket) as client:
            try:
                client.generate(prompt=f"number {number}", max_tokens=60, ignore_eos=True).text()
            except HearthClientError as error:
                return error.code
            return "done"

    with own_daemon(engine_folder(ENGINE)) as daemon, ThreadPoolExecutor(12) as pool:
        ends = list(pool.map(ask, range(12)))
        assert ask(99) == "done"
        log = daemon.log()
    assert (tmp_path / "poisoned").exists()
    assert set(ends) <= {"executor_failed", "done"}
    assert "executor_failed" in ends
    assert "device_lost" in log
