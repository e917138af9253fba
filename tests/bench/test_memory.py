import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from msgspec import structs

from hearth.bench import memory, overhead, toy_daemon
from hearth.bench.__main__ import bench
from hearth.bench.batches import rows_of, run_batch
from hearth.bench.memory import MemoryFigures, measure_memory, memory_figures
from hearth.bench.memory_stages import STAGES, MemoryJob
from hearth.bench.overhead import Arrivals, InProcessLoop, overhead_figures
from hearth.bench.toy_daemon import connected, given_or_toy
from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.predicted import predict_memory
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import EagleDraftingConfig, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowToken
from tests.bench.running import run
from tests.runtime.engine_configs import draft_config, small_config
from tests.runtime.vision.tower_config import config_of

MB = 10**6
USED = {
    "start": 40 * MB,
    "context": 100 * MB,
    "tables and caches": 110 * MB,
    "step buffers": 111 * MB,
    "engine": 150 * MB,
    "sampler": 150 * MB,
    "draft": 152 * MB,
    "tower": 152 * MB,
    "prefix cache": 152 * MB,
    "steps": 160 * MB,
}


def deployment(device: str, *, drafted: bool = False) -> DeploymentConfig:
    base = structs.replace(small_config(), device=device)
    if not drafted:
        return DeploymentConfig(base)
    speculation = SpeculationOptions(eagle=EagleDraftingConfig())
    return DeploymentConfig(base, "eagle", speculation, draft_config(base))


def figures(device: str, used: dict[str, int]) -> MemoryFigures:
    return memory_figures(deployment(device), used)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_predicted_part_belongs_to_one_stage(device: str) -> None:
    parts = predict_memory(deployment(device, drafted=True)).device
    assert ("daemon_process" in parts) == (device == "cpu")
    parts.pop("daemon_process", None)
    assert any(name.startswith("draft_") for name in parts)
    members = [name for names in STAGES.values() for name in names]
    assert len(members) == len(set(members))
    assert set(parts) <= set(members)


def test_a_tower_counts_where_its_device_is_the_engines() -> None:
    tower = config_of("qwen2_5_vl", window_size=112)
    with_tower = {
        device: deployment(device)._replace(tower=structs.replace(tower, device=device))
        for device in ("cpu", "cuda")
    }
    assert memory_figures(with_tower["cpu"], USED).parts["tower"].predicted_mb == 0
    assert memory_figures(with_tower["cuda"], USED).parts["tower"].predicted_mb > 0
    members = {name for names in STAGES.values() for name in names}
    assert set(predict_memory(with_tower["cuda"]).device) <= members


def test_a_part_is_what_its_stage_added() -> None:
    found = figures("cpu", USED)
    assert found.parts["engine"].measured_mb == pytest.approx(39)
    assert found.parts["sampler"].predicted_over_measured is None
    assert found.parts["draft"].measured_mb == pytest.approx(2)
    assert found.measured_mb == pytest.approx(160)
    assert found.predicted_mb == pytest.approx(sum(p.predicted_mb for p in found.parts.values()))


def test_what_a_gpu_held_before_is_not_counted() -> None:
    found = figures("cuda", USED)
    assert found.measured_mb == pytest.approx(120)
    assert found.parts["context"].measured_mb == pytest.approx(60)


@pytest.mark.parametrize(("ratio", "within"), [(0.96, True), (1.04, True), (1.06, False)])
def test_the_aim_is_five_percent(ratio: float, within: bool) -> None:  # noqa: FBT001 - a parameter
    predicted = figures("cuda", USED).predicted_mb
    used = dict.fromkeys(USED, int(predicted / ratio * MB)) | {"start": 0}
    assert figures("cuda", used).within_aim is within


def test_the_command_measures_a_real_engine(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    code, found = run("memory", "--engine", str(toy))
    assert code == 0
    assert found["device"] == "cpu"
    assert found["measured_mb"] > 40
    assert found["parts"]["context"]["measured_mb"] > 20
    assert list(found["parts"]) == list(STAGES)


def test_a_prefix_cache_is_filled_and_told(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    sizes = {}
    for nbytes in (0, 32 * MB):
        code, found = run("memory", "--engine", str(toy), "--prefix-cache-bytes", str(nbytes))
        assert code == 0
        sizes[nbytes] = (found["predicted_mb"], found["measured_mb"])
    predicted, measured = np.subtract(sizes[32 * MB], sizes[0])
    assert predicted >= 32
    assert measured == pytest.approx(predicted, rel=0.2)


def test_a_name_without_a_record_is_refused() -> None:
    with pytest.raises(click.UsageError, match="--name is for --record"):
        CliRunner().invoke(
            bench, ["memory", "--name", "x"], standalone_mode=False, catch_exceptions=False
        )


def test_an_engine_that_cannot_be_opened_is_told(toy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(toy, folder)
    model = folder / "model.onnx"
    model.write_bytes(bytes(model.stat().st_size))
    with pytest.raises(HearthError, match=r"model\.onnx") as caught:
        measure_memory(MemoryJob(str(folder)), tmp_path / "log")
    assert caught.value.code.startswith("engine_")


@pytest.mark.parametrize(("device", "lines"), [("cpu", 1), ("cuda", 0)])
def test_a_table_of_the_cpu_says_why_its_parts_are_not_comparable(
    device: str, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    memory._print(figures(device, USED))
    said = capsys.readouterr()
    assert "predicted_over_measured" in said.out
    assert len(said.out.splitlines()) == 2 + len(STAGES) + 1
    assert said.err.count("Compare the sums.") == lines


def test_figures_are_differences_of_medians() -> None:
    quick = Arrivals(
        tokens=[0.0004, 0.0005, 0.0009], first=[0.0006, 0.0007], ttft=[0.0071, 0.0072, 0.1]
    )
    default = Arrivals(tokens=[0.001], first=[0.001], ttft=[0.0122])
    found = overhead_figures(quick, default, [0.006, 0.0062, 0.007], (1552.0, 1600.0))
    assert found.ttft_added_ms == pytest.approx(1.0)
    assert found.token_added_ms == pytest.approx(0.5)
    assert found.first_token_added_ms == pytest.approx(0.65)
    assert found.ttft_added_default_ms == pytest.approx(6.0)
    assert found.throughput_loss_8 == pytest.approx(0.03)
    assert found.token_added_p99_ms > 0.8


def test_the_in_process_loop_takes_at_least_the_time_of_its_steps(toy: Path) -> None:
    with closing(InProcessLoop(toy, step_ms=2.0)) as loop:
        assert loop.first_token_s("switch the light on") >= 0.002
        assert 0 < loop.tokens_per_s(["a", "b b", "c"], max_tokens=20) <= 1500


def test_the_in_process_loop_counts_every_token(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(InProcessLoop(toy, step_ms=0.0)) as loop:
        times = iter([100.0, 104.0])
        monkeypatch.setattr(overhead, "monotonic", times.__next__)
        assert loop.tokens_per_s(["a", "b b", "c"], max_tokens=20) == 60 / 4


def test_the_command_gives_its_figures() -> None:
    sizes = ("--requests", "3", "--rounds", "1", "--max-tokens", "12", "--step-ms", "1")
    _, figures = run("overhead", *sizes)
    assert min(figures["token_added_ms"], figures["first_token_added_ms"]) > 0
    assert min(figures["tokens_per_s_8"], figures["in_process_tokens_per_s_8"]) > 0
    assert figures["throughput_loss_8"] < 1


PROMPTS = [[5, 6, 7] * 6, [9, 10] * 9]


def test_a_batch_gives_its_tokens_and_its_times(runtime: LLMInferenceRuntime) -> None:
    rows = rows_of(PROMPTS, RequestOptions(max_tokens=20, ignore_eos=True))
    run = run_batch(runtime, rows)
    assert [len(one) for one in run.token_ids] == [20, 20]
    assert run.generated == 38
    assert run.steps[0].kind == "prefill"
    assert "verify" in {step.kind for step in run.steps}
    inside = sum(step.seconds for step in run.steps)
    assert 0 < inside <= run.prefill_s + run.generation_s
    assert not runtime.active


def test_rows_that_end_are_live_no_more(runtime: LLMInferenceRuntime) -> None:
    rows = [
        row
        for prompt, tokens in zip(PROMPTS, (3, 20), strict=True)
        for row in rows_of([prompt], RequestOptions(max_tokens=tokens, ignore_eos=True))
    ]
    steps = run_batch(runtime, rows).steps
    assert [step.rows for step in steps] == sorted((step.rows for step in steps), reverse=True)
    assert {step.rows for step in steps} == {1, 2}


def test_a_wish_is_the_row_s(runtime: LLMInferenceRuntime) -> None:
    rows = rows_of(PROMPTS, RequestOptions(max_tokens=20, ignore_eos=True, speculation=False))
    assert {step.kind for step in run_batch(runtime, rows).steps} == {"prefill", "decode"}


def test_a_row_that_fails_ends_the_run(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = runtime.step

    def failing() -> object:
        result = step()
        result.tokens = [RowToken(1, -1, error="non_finite")]
        return result

    monkeypatch.setattr(runtime, "step", failing)
    with pytest.raises(HearthError, match="row 1 failed"):
        run_batch(runtime, rows_of(PROMPTS, RequestOptions(max_tokens=4)))
    assert not runtime.active


async def test_every_client_has_a_connection_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    open_now: list[object] = []

    @asynccontextmanager
    async def connect(address: Path) -> AsyncIterator[object]:
        assert address == Path("socket")
        open_now.append(object())
        yield open_now[-1]
        open_now.pop()

    monkeypatch.setattr(toy_daemon, "AsyncClient", connect)
    async with connected(Path("socket"), 3) as clients:
        assert clients == open_now
        assert len(set(clients)) == 3
    assert open_now == []


def test_a_toy_stands_in_where_no_engine_is_given(tmp_path: Path) -> None:
    with given_or_toy(tmp_path) as engine:
        assert engine == tmp_path
    with given_or_toy() as engine:
        assert load_config(engine).max_kv_cache_capacity == 2048
    assert not engine.exists()
