import resource
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.config import LORA_TARGETS, LLMEngineRunnerConfig
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.device import Device
from hearth.runtime.device.open import measuring_device
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.assembly import draft_zeros, open_sampler
from hearth.runtime.generation.deployment import DeploymentConfig, load_deployment
from hearth.runtime.generation.predicted import build_measured, predict_memory
from hearth.runtime.kv_cache.page_pool import PagePool
from hearth.runtime.kv_cache.pages import TierCapacity
from hearth.runtime.memory.estimates import estimate_engine
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from hearth.runtime.runner.pipeline_io import DraftIO, PipelineIO
from hearth.runtime.runner.shared_resources import SharedResources
from hearth.runtime.tensors.lora import lora_targets
from hearth.runtime.tensors.tensor import Tensor
from hearth.runtime.weights.weights_file import load_layout
from tests.references import reference_folder
from tests.runtime.device.cuda.resource_driver import ResourceDriver
from tests.runtime.device.cuda.test_tree_launches import NoCompiler
from tests.runtime.engine_configs import draft_config, small_config
from tests.runtime.vision.tower_config import config_of

MIB = 1 << 20
DRAFTING = EagleDraftingConfig(drafting_top_k=2, drafting_step=3, verify_tree_size=5)
EAGLE = SpeculationOptions(eagle=DRAFTING)
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float16", "kv_cache_dtype": "float16"}
SIMULATED = simulated_config(
    vocab_size=1_000_003, layers=2, max_batch=4, capacity=64, prefill_chunk=16
)


def predicted(config: LLMEngineRunnerConfig) -> dict[str, int]:
    return predict_memory(DeploymentConfig(config)).device


def of(rows: int, capacity: int, config: LLMEngineRunnerConfig) -> dict[str, int]:
    limits = {"max_supported_batch_size": rows, "max_kv_cache_capacity": capacity}
    return predicted(structs.replace(config, **limits))


def seeing(base: LLMEngineRunnerConfig) -> DeploymentConfig:
    """A base with a draft, pictures, and rows with rotary tables of their own."""
    rope = structs.replace(base.rope_config, mrope_section=(2, 1, 1))
    base = structs.replace(
        base,
        enable_eagle_spec_decode=True,
        output_hidden_dim=48,
        max_verify_tree_size=5,
        image_token_id=5,
        num_deepstack_features=2,
        use_context_dependent_rope=True,
        rope_config=rope,
    )
    tower = structs.replace(config_of("qwen2_5_vl", window_size=112), device=base.device)
    draft = draft_config(base)
    return DeploymentConfig(base, "eagle", EAGLE, draft, tower=tower, prefix=TierCapacity(4, 3, 9))


def test_what_is_measured_of_two_rows_over_one_head() -> None:
    grouped = structs.replace(small_config(), **ON_GPU, hidden_size=1024, vocab_size=50_000)
    grouped = structs.replace(grouped, num_kv_heads=2, max_kv_cache_capacity=4096)
    parts, estimated = predicted(grouped), estimate_engine(grouped)
    # A table larger than a chunk has an allocation of its own, of whole units of the driver.
    assert parts["embedding"] == 98 * MIB
    assert parts["kv_cache"] == 2 * 2 * 4 * 2 * 4096 * 8 * 2
    assert parts["rope"] == 2 * 4096 * 4 * 4
    small = ("weights", "step_buffers", "sampler", "kv_cache", "rope")
    assert sum(parts[name] for name in small) - estimated["weights"] == 32 * MIB


def test_parts_of_a_base_with_a_draft_and_pictures() -> None:
    parts = predict_memory(seeing(small_config())).device
    measured = {name: parts[name] for name in FROZEN}
    assert measured == FROZEN


FROZEN = {
    "embedding": 6400,
    "kv_cache": 32768,
    "rope": 10240 + 16,
    "step_buffers": 39120,
    "zeros": 1280,
    "draft_kv_cache": 16384,
    "draft_rope": 10240 + 16,
    "draft_buffers": 22400,
    "draft_zeros": 3328,
    "vision_buffers": 150336,
}


class SizedDriver(ResourceDriver):
    """A driver that remembers the bytes of each allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)
        if name != "cuMemAlloc":
            return call

        def allocate(size: int) -> Any:
            self.sizes.append(size)
            return call(size)

        return allocate


class CountingCpu(CpuDevice):
    """Host memory, of which the bytes are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        tensor = super().zeros(name, shape, dtype)
        self.taken += tensor.nbytes
        return tensor


def build(deployment: DeploymentConfig, device: Device) -> SharedResources:
    """Real memory for a simulated engine."""
    zeros = draft_zeros(deployment)
    resources = SharedResources.create_for_llm(deployment.base, Path(), device, zeros=zeros)
    if deployment.draft is not None:
        resources.add_draft(deployment.draft, Path(), device)
    open_sampler(deployment, PipelineIO.create_for_llm(deployment.base, resources, device), device)
    if deployment.draft is not None:
        drafting = deployment.drafting
        DraftIO.create_for_spec_decode_draft(deployment.draft, drafting, resources, device)
    PagePool(device, resources.cache_managers, deployment.prefix)
    return resources


def simulated(device: str) -> DeploymentConfig:
    base = structs.replace(
        SIMULATED, device=device, enable_eagle_spec_decode=True, max_verify_tree_size=5
    )
    draft = structs.replace(draft_config(base), base_hidden_dim=base.output_hidden_dim)
    return DeploymentConfig(base, "eagle", EAGLE, draft, prefix=TierCapacity(400))


def test_a_cpu_takes_what_is_measured() -> None:
    deployment, device, counting = simulated("cpu"), measuring_device("cpu"), CountingCpu()
    build_measured(deployment, device)
    resources = build(deployment, counting)
    # The table of each draft id is an array already, and so is that of the tokens.
    given = resources.embedding.nbytes
    assert sum(device.parts().values()) == counting.taken + given


def test_a_gpu_takes_what_is_measured() -> None:
    deployment, device, api = simulated("cuda"), measuring_device("cuda"), SizedDriver()
    build_measured(deployment, device)
    compiler: Any = NoCompiler()
    gpu = CudaDevice(CudaContext(CudaDriver(api)), compiler)
    build(deployment, gpu)
    gpu.close()
    assert len(api.sizes) > 1
    units = sum(-(-size // (2 * MIB)) for size in api.sizes)
    assert sum(device.parts().values()) == units * 2 * MIB


def test_nothing_is_taken_to_measure_a_large_model() -> None:
    sizes = {"num_decoder_layers": 36, "num_attention_layers": 36, "hidden_size": 2560}
    rows = {"max_kv_cache_capacity": 32_768, "max_supported_batch_size": 16, "head_dim": 128}
    large = structs.replace(small_config(), **sizes, **rows, vocab_size=150_000)
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for backend, device in (("onnxruntime", "cpu"), ("kernels", "cuda")):
            parts = predicted(structs.replace(large, backend=backend, device=device))
            assert parts["kv_cache"] > 5e9
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * MIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10


def test_parts_grow_with_what_they_depend_on() -> None:
    small, rows, slots = (of(n, c, small_config()) for n, c in ((1, 32), (2, 32), (1, 64)))
    assert small["kv_cache"] == 32 * 2 * 2 * 8 * 4
    assert rows["kv_cache"] == slots["kv_cache"] == 2 * small["kv_cache"]
    assert rows["step_buffers"] > small["step_buffers"] == slots["step_buffers"]
    assert slots["attention_scratch"] == pytest.approx(2 * small["attention_scratch"], rel=0.01)
    assert rows["weights"] == slots["weights"] == small["weights"]


def test_a_16_bit_cache_takes_half() -> None:
    half = structs.replace(small_config(), dtype="float16", kv_cache_dtype="float16")
    wide, narrow = predicted(small_config()), predicted(half)
    assert 2 * narrow["kv_cache"] == wide["kv_cache"]
    assert 2 * narrow["embedding"] == wide["embedding"]


def test_the_classic_dialect_holds_new_rows_and_more_scores() -> None:
    native = predicted(small_config())
    other = predicted(structs.replace(small_config(), dialect="classic"))
    assert other["step_buffers"] > native["step_buffers"]
    assert other["attention_scratch"] > native["attention_scratch"]


def test_trees_count_in_buffers_and_scores() -> None:
    trees = structs.replace(
        small_config(), enable_eagle_spec_decode=True, output_hidden_dim=48, max_verify_tree_size=5
    )
    small, large = of(2, 64, small_config()), of(2, 64, trees)
    assert large["attention_scratch"] - small["attention_scratch"] == 2 * 16 * 64 * 2
    assert large["step_buffers"] > small["step_buffers"]
    same = set(small) - {"attention_scratch", "step_buffers"}
    assert [large[name] for name in same] == [small[name] for name in same]


def test_an_engine_of_a_gpu_has_parts_of_its_own() -> None:
    config = structs.replace(small_config(), **ON_GPU)
    parts, host = predict_memory(DeploymentConfig(config))
    assert set(parts) >= {"context", "library", "weights", "kv_cache", "sampler"}
    assert "process" not in parts
    assert host["weights_while_loading"] == parts["weights"] > 0
    assert predict_memory(DeploymentConfig(small_config())).host == {}


def test_adapters_of_a_gpu_have_the_greatest_rank_and_slots() -> None:
    taking = structs.replace(small_config(), max_supported_lora_rank=8, lora_targets=LORA_TARGETS)
    assert predict_memory(DeploymentConfig(taking, adapters=(100, 20))).device["adapters"] == 120
    fixed = structs.replace(taking, hidden_size=2048, **ON_GPU)
    fixed = structs.replace(fixed, lora_targets=lora_targets(fixed))
    one, three = (
        predict_memory(DeploymentConfig(fixed, adapters=adapters)).device["adapters"]
        for adapters in ((), (100, 20))
    )
    assert three == pytest.approx(3 * one, rel=0.01)


def test_without_an_adapter_nothing_is_said_of_any() -> None:
    assert "adapters" not in predicted(small_config())


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_tables_and_weights_are_as_large_as_their_files_say(
    tmp_path: Path, quantization: Any
) -> None:
    # The sources of a tied head have 16 bits, which a head that reads the table widens.
    for name, item in (("qwen3", 4 if quantization == "none" else 2), ("qwen3_untied", 2)):
        target = tmp_path / name
        options = ExportOptions(quantization=quantization, external_weights=True)
        config = export_model(reference_folder(name), target, options)
        table = load_layout(target).tensors["embedding"].nbytes
        assert table == item * config.vocab_size * config.hidden_size
        smaller = load_deployment(target, RuntimeOptions(verify=False, capacity=64))
        parts = predict_memory(smaller).device
        assert parts["embedding"] == table
        # The tables of a smaller capacity are those that were exported.
        assert parts["rope"] == 2 * config.max_kv_cache_capacity * config.rotary_dim // 2 * 4
