import subprocess
import sys
from pathlib import Path

from msgspec import structs

from hearth.runtime.config import FileRecord, PlanRecord
from hearth.runtime.device.open import measuring_device
from hearth.runtime.export.options import Dialect, ExportOptions
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.generation.budget import budgets_of
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.predicted import predict_memory
from hearth.runtime.memory.estimates import estimate_tower
from hearth.runtime.tensors.registry import tower_dims
from hearth.runtime.vision.vision_runner import allocate_tower_buffers
from tests.runtime.engine_configs import small_config
from tests.runtime.vision.tower_config import config_of
from tests.vision_models import Family, write_vision_model

ROOT = Path(__file__).parents[3]
SIDE = 40
MEASURE = """
import sys
from pathlib import Path
import numpy as np
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.images import ImageLayout
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import load_vision_config

def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10

folder, side = Path(sys.argv[1]), int(sys.argv[2])
config = load_vision_config(folder)
runner = VisionRunner.open(folder / "visual", config, EngineOptions(threads=1), CpuDevice())
layout = ImageLayout(0, 0, (1, side, side), side * side // 4)
patches = np.zeros((layout.patches, config.patch_bytes), np.uint8)
start = kib("VmRSS")
runner.encode([(patches, layout)])
print(kib("VmHWM") - start)
"""


def test_a_large_picture_takes_what_is_predicted(tmp_path: Path, dialect: Dialect) -> None:
    # One of them has windows.
    family: Family = "qwen2_5_vl" if dialect == "classic" else "qwen3_vl"
    vision = {"hidden_size": 128, "num_heads": 4, "intermediate_size": 256}
    source = write_vision_model(tmp_path / "model", family, vision=vision)
    config = write_vision(source, tmp_path, ExportOptions(dialect=dialect))
    assert config is not None
    arguments = [sys.executable, "-c", MEASURE, str(tmp_path), str(SIDE)]
    measured = int(subprocess.check_output(arguments, cwd=ROOT))
    patches, device = SIDE * SIDE, measuring_device("cpu")
    device.begin("vision_buffers")
    allocate_tower_buffers(config, tower_dims(config, patches), device)
    predicted = estimate_tower(config, patches)["vision_scratch"]
    predicted += device.parts()["vision_buffers"]
    assert measured < predicted < 2 * measured


def test_a_tower_on_the_cpu_has_processes_of_its_own() -> None:
    record = FileRecord(1000, "")
    files = {"model.onnx.data": record}
    tower = config_of("qwen3_vl", dtype="float16", position_side=4, files=files)
    parts = estimate_tower(tower, 2048)
    assert parts["vision_processes"] > 0
    assert parts["vision_weights"] == 2000
    assert estimate_tower(tower, 512)["vision_scratch"] < parts["vision_scratch"]
    # Fewer tokens of a row are smaller pictures.
    large, small = (
        predict_memory(
            DeploymentConfig(
                structs.replace(small_config(), max_kv_cache_capacity=slots), tower=tower
            )
        ).device
        for slots in (1024, 256)
    )
    assert large | parts == large
    assert small["vision_buffers"] < large["vision_buffers"]


def test_on_a_gpu_plans_share_their_scratch_memory() -> None:
    def plan(scratch: int) -> PlanRecord:
        return PlanRecord(
            tensorrt_version="10.0", builder="tensorrt", version_compatible=False, gpu_name="",
            compute_capability="", graph_sha256="", scratch_bytes=scratch,
        )  # fmt: skip

    on_gpu = {"backend": "tensorrt", "device": "cuda"}
    base = structs.replace(small_config(), **on_gpu, plan=plan(5000))
    tower = config_of("qwen2_5_vl", **on_gpu, window_size=112, plan=plan(7000))
    deployment = DeploymentConfig(base, tower=tower)
    assert predict_memory(deployment).device["vision_scratch"] == 2000
    gpu, host = budgets_of(deployment, 1 << 40, 1 << 40)
    assert "vision_processes" not in gpu.parts
    assert host.parts["vision_processes"] > 0


def test_what_pictures_may_take_counts_on_the_host() -> None:
    tower = config_of("qwen3_vl", position_side=4)
    cpu = DeploymentConfig(small_config(), tower=tower)._replace(image_memory=1 << 28)
    (budget,) = budgets_of(cpu, 1 << 40, None)
    assert budget.parts["vision_memory"] == 1 << 28
    base = structs.replace(small_config(), device="cuda")
    gpu = DeploymentConfig(base, tower=structs.replace(tower, device="cuda"))._replace(
        image_memory=1 << 28
    )
    on_gpu, host = budgets_of(gpu, 1 << 40, 1 << 40)
    assert host.parts["vision_memory"] == 1 << 28
    assert "vision_memory" not in on_gpu.parts
    (shared,) = budgets_of(gpu, 1 << 40, None)
    assert shared.parts["host_vision_memory"] == 1 << 28
    (text,) = budgets_of(DeploymentConfig(small_config()), 1 << 40, None)
    assert "vision_memory" not in text.parts
