import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from msgspec import structs

from hearth.bench.memory import measure_memory
from hearth.bench.memory_stages import MemoryJob
from hearth.daemon.shipped import DRAFT, SOURCE
from hearth.runtime.config import LORA_TARGETS, FileRecord, LLMEngineRunnerConfig, PlanRecord
from hearth.runtime.device.open import measuring_device
from hearth.runtime.engine_folder import DATA_FILE, PLAN_FILE
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.export.options import Dialect, resolve_dialect
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.generation.budget import budgets_of
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.predicted import predict_memory
from hearth.runtime.memory.estimates import (
    LOADING,
    adapter_bytes,
    cuda_scratch_bytes,
    estimate_draft,
    estimate_engine,
    estimate_host,
    estimate_tower,
    prompt_graph_bytes,
)
from hearth.runtime.memory.sizes import (
    kv_cache_bytes,
    predicted_scratch,
    projection_bytes,
    projection_elements,
)
from hearth.runtime.options import EagleDraftingConfig
from hearth.runtime.tensors.lora import lora_targets
from hearth.runtime.tensors.registry import tower_dims
from hearth.runtime.vision.vision_runner import allocate_tower_buffers
from tests.references import reference_folder
from tests.runtime.engine_configs import PLAN, draft_config, small_config
from tests.runtime.export.test_export import make_model
from tests.runtime.vision.tower_config import config_of
from tests.vision_models import Family, write_vision_model

ROOT = Path(__file__).parents[3]
MEASURE = """
import sys
from pathlib import Path
from hearth.runtime.config import load_config
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.onnx_engine import OnnxEngine

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

start = resident()
folder = Path(sys.argv[1])
engine = OnnxEngine.open(folder, load_config(folder), EngineOptions(threads=1))
print(resident() - start)
"""


def test_a_simulated_engine_has_no_weights() -> None:
    config = msgspec.structs.replace(small_config(), backend="simulated")
    parts = estimate_engine(config)
    assert parts["weights"] == parts["attention_scratch"] == parts["activations"] == 0


def test_a_tree_larger_than_a_chunk_is_the_longest_step() -> None:
    config = msgspec.structs.replace(small_config(), max_verify_tree_size=32)
    small, large = (estimate_engine(c) for c in (small_config(), config))
    assert large["activations"] == 2 * small["activations"]


def test_captured_prefill_steps_of_a_gpu_count() -> None:
    config = msgspec.structs.replace(small_config(), device="cuda", prefill_chunk=64)
    kernels = msgspec.structs.replace(config, backend="kernels", dtype="float16")
    assert prompt_graph_bytes(config) == 0
    one, four = (
        prompt_graph_bytes(msgspec.structs.replace(kernels, max_supported_batch_size=n))
        for n in (1, 4)
    )
    assert four == 4 * one > 2 * config.num_decoder_layers << 10


def test_captured_prompts_have_the_kernels_of_adapters() -> None:
    plain = msgspec.structs.replace(small_config(), backend="kernels", device="cuda")
    taking = msgspec.structs.replace(plain, max_supported_lora_rank=8)
    taking = msgspec.structs.replace(taking, lora_targets=lora_targets(taking))
    # Twelve beside the fourteen of a layer; eight stand outside of the layers.
    kernels = [prompt_graph_bytes(one) for one in (plain, taking)]
    assert kernels[1] * (2 * 14 + 8) == kernels[0] * (2 * 26 + 8)


def test_adapters_on_the_cpu_are_as_large_as_their_files() -> None:
    config = msgspec.structs.replace(
        small_config(), max_supported_lora_rank=8, lora_targets=LORA_TARGETS
    )
    assert adapter_bytes(config, [100, 20]) == 120


@pytest.mark.slow
def test_what_a_draft_adds_to_a_real_runtime(tmp_path: Path) -> None:
    added: dict[str, tuple[float, float]] = {}
    for name, draft in (("plain", None), ("drafted", DraftOptions(folder=DRAFT))):
        folder = tmp_path / name
        export_model(SOURCE, folder, ExportOptions(capacity=512, draft=draft))
        found = measure_memory(MemoryJob(str(folder)), tmp_path / "log")
        added[name] = (found.predicted_mb, found.measured_mb)
    for predicted, measured in added.values():
        assert predicted == pytest.approx(measured, rel=0.15)


def test_scores_of_every_bucket_count() -> None:
    one, three = (
        estimate_engine(msgspec.structs.replace(small_config(), max_kv_cache_capacity=slots))
        for slots in (256, 1024)
    )
    assert three["attention_scratch"] == pytest.approx(7 * one["attention_scratch"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_weights_of_a_real_session(
    tmp_path: Path, quantization: Literal["none", "int8", "int4"]
) -> None:
    if quantization == "int8" and resolve_dialect(ExportOptions()) == "classic":
        pytest.skip("ONNX Runtime 1.23 packs int4 alone")
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    model = make_model(tmp_path / "m", 1, vocab_size=8192, **sizes, **heads)
    config = export_model(model, tmp_path / "engine", ExportOptions(quantization=quantization))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "engine")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    predicted = estimate_engine(config)["weights"]
    assert int(done.stdout) == pytest.approx(predicted, rel=0.1)


def of(rows: int, capacity: int, config: LLMEngineRunnerConfig) -> LLMEngineRunnerConfig:
    return structs.replace(config, max_supported_batch_size=rows, max_kv_cache_capacity=capacity)


def scratch_of(rows: int, capacity: int, config: LLMEngineRunnerConfig) -> int:
    return estimate_engine(of(rows, capacity, config))["engine_scratch"]


def weight_bytes(config: LLMEngineRunnerConfig) -> int:
    return estimate_engine(config)["weights"]


@pytest.fixture
def config() -> LLMEngineRunnerConfig:
    return structs.replace(small_config(), device="cuda", dtype="float16", kv_cache_dtype="float16")


def test_weights_stay_in_their_type(config: LLMEngineRunnerConfig) -> None:
    wide = structs.replace(config, dtype="float32")
    assert weight_bytes(wide) == 2 * weight_bytes(config)
    gains = 2 * (2 * 16 + 2 * 8) + 16
    assert weight_bytes(config) == 2 * (projection_elements(config) + gains)


def test_a_plan_is_as_large_as_its_file(config: LLMEngineRunnerConfig) -> None:
    files = {PLAN_FILE: FileRecord(4321, "")}
    assert weight_bytes(structs.replace(config, files=files)) == 4321


def test_a_plan_says_what_its_steps_take(config: LLMEngineRunnerConfig) -> None:
    unopened = structs.replace(config, plan=PLAN)
    opened = structs.replace(config, plan=structs.replace(PLAN, scratch_bytes=640))
    guess, known = (scratch_of(2, 32, one) for one in (unopened, opened))
    assert guess == cuda_scratch_bytes(of(2, 32, config), 16)
    assert known == 640


def test_scratch_memory_grows_with_rows_and_slots(config: LLMEngineRunnerConfig) -> None:
    small, rows, slots = (scratch_of(*one, config) for one in ((1, 32), (2, 32), (1, 64)))
    assert rows > small < slots


def test_kernels_lay_their_scratch_memory_out(config: LLMEngineRunnerConfig) -> None:
    kernels = structs.replace(config, backend="kernels")
    assert scratch_of(2, 32, kernels) == predicted_scratch(kernels, 2, 16, 32)
    # They bind their weights.
    assert weight_bytes(kernels) == 0


def test_another_engine_has_another_library(config: LLMEngineRunnerConfig) -> None:
    kinds = ("onnxruntime", "tensorrt")
    libraries = {
        estimate_engine(structs.replace(config, backend=kind))["library"] for kind in kinds
    }
    assert len(libraries) == 2


def test_products_of_16_bits_bring_more_of_a_library(config: LLMEngineRunnerConfig) -> None:
    wide = structs.replace(config, dtype="float32")
    assert estimate_engine(wide)["library"] < estimate_engine(config)["library"]


def test_a_simulated_engine_has_no_library_and_no_scratch(config: LLMEngineRunnerConfig) -> None:
    simulated = structs.replace(config, backend="simulated")
    parts = estimate_engine(simulated)
    assert parts["weights"] == parts["library"] == parts["engine_scratch"] == 0


def test_the_host_holds_the_weights_while_they_load(config: LLMEngineRunnerConfig) -> None:
    parts = estimate_host(config, 1234)
    assert parts[LOADING] == 1234
    assert parts["process"] > parts["pinned"] > 0


def test_scores_grow_with_slots_and_trees_add_their_mask(config: LLMEngineRunnerConfig) -> None:
    trees = structs.replace(
        config, enable_eagle_spec_decode=True, output_hidden_dim=48, max_verify_tree_size=16
    )
    small, large = ([scratch_of(2, slots, one) for slots in (32, 64)] for one in (config, trees))
    assert small[1] - small[0] == 2 * 16 * (2 * 2) * 32 * 2
    # Two copies of the scores, and the mask, of two heads over one and two rows of 16 tokens.
    assert large[1] - large[0] == 2 * 16 * (2 * 2 + 2) * 32 * 2


def test_a_draft_of_a_gpu_keeps_its_type(config: LLMEngineRunnerConfig) -> None:
    draft = draft_config(config)
    drafting = EagleDraftingConfig(drafting_top_k=2, drafting_step=3)
    parts = estimate_draft(draft, drafting)
    assert parts["draft_library"] > 0
    assert parts["draft_weights"] == weight_bytes(draft)
    assert parts["draft_scratch"] == cuda_scratch_bytes(draft, 16)


SIDE = 40
MEASURE_TOWER = """
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
    arguments = [sys.executable, "-c", MEASURE_TOWER, str(tmp_path), str(SIDE)]
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


def test_caches_grow_with_their_slots() -> None:
    config = small_config()
    assert kv_cache_bytes(config, 1, 1) == 2 * 2 * 1 * 8 * 4
    assert kv_cache_bytes(config, 3, 16) == 48 * kv_cache_bytes(config, 1, 1)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_bytes_of_projections_are_those_of_the_data_file(
    tmp_path: Path, quantization: Literal["none", "int8", "int4"]
) -> None:
    folder = tmp_path / "engine"
    options = ExportOptions(quantization=quantization)
    config = export_model(reference_folder("qwen3_untied"), folder, options)
    stored = (folder / DATA_FILE).stat().st_size
    padding = 2 * 4096 * (4 * config.num_decoder_layers + 1)
    assert stored - padding <= projection_bytes(config) <= stored
