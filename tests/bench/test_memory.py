import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from msgspec import structs

from hearth.bench import memory
from hearth.bench.__main__ import bench
from hearth.bench.memory import MemoryFigures, measure_memory, memory_figures
from hearth.bench.memory_stages import STAGES
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.predicted import predict_memory
from hearth.runtime.options import EagleDraftingConfig, SpeculationOptions
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
        measure_memory(folder, tmp_path / "log")
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
