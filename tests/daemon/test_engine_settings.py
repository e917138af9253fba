from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import onnxruntime
import pytest
from cuda.bindings import nvrtc
from msgspec import structs

from hearth.actors.addresses import SocketFolder
from hearth.actors.messages import ExecutorLimits, ExecutorReady
from hearth.actors.roles import ExecutorSettings
from hearth.actors.supervisor_messages import ActorReady
from hearth.daemon import gpu_facts as module
from hearth.daemon.configuration.settings import Settings, replaced, settings_of
from hearth.daemon.engine_settings import (
    encoder_plan,
    executor_plan,
    executor_ready,
    runtime_options,
)
from hearth.daemon.gpu_facts import GPUFacts, check_gpu, gpu_facts, serving_library
from hearth.daemon.vision_memory import most_tokens, open_vision_memory
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.vision_config import VISION_CONFIG_FILE, VISION_FOLDER
from tests.runtime.engine_configs import PLAN, small_config
from tests.runtime.image_processing.photographs import config_like


def test_the_runtime_is_given_its_section_with_paths_and_the_memory_of_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    settings = settings_of(
        threads=13, weights="w", images_in_flight_bytes=1 << 21, image_cache_bytes=1 << 20
    )
    assert runtime_options(settings) == structs.replace(
        settings.runtime,
        weights=str(Path.cwd() / "w"),
        adapters=str(tmp_path / "adapters"),
        image_memory=3 << 20,
    )


def test_the_prefix_cache_is_set_under_the_same_names(tmp_path: Path) -> None:
    assert runtime_options(Settings()).prefix_folder == ""
    settings = settings_of(
        prefix_cache_bytes=1, prefix_host_bytes=2, prefix_disk_bytes=3, prefix_folder=str(tmp_path)
    )
    options = runtime_options(settings)
    assert (options.prefix_cache_bytes, options.prefix_host_bytes) == (1, 2)
    assert (options.prefix_disk_bytes, options.prefix_folder) == (3, str(tmp_path))


def test_pages_are_spilled_to_the_cache_where_no_folder_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    options = runtime_options(settings_of(prefix_disk_bytes=1))
    assert options.prefix_folder == str(tmp_path / "prefix")


@pytest.mark.parametrize("name", ["prefix_host_bytes", "prefix_disk_bytes"])
def test_what_takes_from_a_prefix_cache_is_refused_where_there_is_none(name: str) -> None:
    with pytest.raises(HearthError, match="prefix_cache_bytes, which is 0") as caught:
        runtime_options(settings_of(prefix_cache_bytes=0, **{name: 1}))
    assert (caught.value.code, caught.value.field) == ("invalid_value", name)


def test_the_executor_s_paths_do_not_depend_on_the_working_folder() -> None:
    settings = settings_of(restart_limit=7, log_format="json", threads=3, weights="w")
    plan = executor_plan(settings, Path("engines/x"), "b09")
    assert isinstance(plan.settings, ExecutorSettings)
    assert plan.settings.engine == str(Path.cwd() / "engines/x")
    assert plan.settings.options.weights == str(Path.cwd() / "w")
    assert (plan.role, plan.epoch) == ("executor", "b09")


def test_a_plan_has_the_sections_themselves() -> None:
    settings = settings_of(restart_limit=7, log_format="json", threads=3)
    plan = executor_plan(settings, Path("x"))
    assert plan.supervision is settings.supervision
    assert plan.logs is settings.logs


def test_the_scheduler_is_told_where_an_executor_listens_and_what_it_takes() -> None:
    addresses = SocketFolder(Path("/run/h")).addresses("executor", 2)
    ready = ActorReady("executor-2", 1, {}, ExecutorLimits(3, 4, 5))
    assert executor_ready(ready, addresses) == ExecutorReady(
        2, "ipc:///run/h/executor-2", ExecutorLimits(3, 4, 5)
    )


GPU = GPUFacts(
    name="Some GPU",
    compute_capability=(9, 0),
    driver="13.0",
    memory_total=8 << 30,
    memory_free=6 << 30,
)
GPU_PLAN = structs.replace(
    PLAN,
    tensorrt_version="10.16.1",
    version_compatible=False,
    gpu_name="Some GPU",
    compute_capability="9.0",
)


class FakeContext:
    def __init__(self) -> None:
        self.closed = False
        self.properties = SimpleNamespace(name="Some GPU", compute_capability=(9, 0))
        self.driver = SimpleNamespace(call={"cuDriverGetVersion": 13000}.__getitem__)

    def memory(self) -> tuple[int, int]:
        return 6 << 30, 8 << 30

    def free_memory(self) -> int:
        return 6 << 30

    def close(self) -> None:
        self.closed = True


def test_facts_are_asked_for_in_a_context_that_is_given_back() -> None:
    context: Any = FakeContext()
    assert gpu_facts(lambda: context) == GPU
    assert context.closed


def test_an_integrated_gpu_has_no_free_memory_of_its_own() -> None:
    context: Any = FakeContext()
    context.free_memory = lambda: None
    assert gpu_facts(lambda: context).memory_free is None


def test_a_context_is_given_back_when_an_answer_fails() -> None:
    context: Any = FakeContext()
    context.driver = SimpleNamespace(call={}.__getitem__)
    with pytest.raises(KeyError):
        gpu_facts(lambda: context)
    assert context.closed


KERNELS = structs.replace(small_config(), backend="kernels", device="cuda", dtype="float16")


def test_kernels_are_compiled_and_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"NVRTC \d+\.\d+", serving_library(KERNELS))
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (1, 0, 0))
    with pytest.raises(HearthError, match="does not say its version") as caught:
        serving_library(KERNELS)
    assert caught.value.code == "engine_incompatible"


def test_kernels_need_a_gpu_from_ampere_on() -> None:
    check_gpu(KERNELS, structs.replace(GPU, compute_capability=(8, 0)), "NVRTC 13.0")
    with pytest.raises(HearthError, match=r"has 7\.5: export with --backend onnxruntime") as caught:
        check_gpu(KERNELS, structs.replace(GPU, compute_capability=(7, 5)), "NVRTC 13.0")
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "device")


def test_the_library_of_an_onnx_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.31.1")
    monkeypatch.setattr(onnxruntime, "get_available_providers", list)
    assert serving_library(small_config()) == "onnxruntime 1.31.1"
    config = structs.replace(small_config(), device="cuda")
    with pytest.raises(HearthError, match="pip install") as caught:
        serving_library(config)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "device")
    names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
    assert serving_library(config) == "onnxruntime 1.31.1"
    monkeypatch.setattr(onnxruntime, "__version__", "1.29.0")
    with pytest.raises(HearthError, match=r"needs ONNX Runtime 1\.30 or newer, this is 1\.29\.0"):
        serving_library(config)


def test_the_library_of_a_plan_is_the_builders(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(builder: str) -> object:
        asked.append(builder)
        return SimpleNamespace(__name__="tensorrt_lean", __version__="10.16.1")

    monkeypatch.setattr(module, "load_library", load)
    config = structs.replace(small_config(), device="cuda", backend="tensorrt", plan=GPU_PLAN)
    assert serving_library(config) == "tensorrt_lean 10.16.1"
    assert asked == ["tensorrt"]


def test_a_simulated_engine_needs_no_library() -> None:
    assert serving_library(structs.replace(small_config(), backend="simulated")) == "simulated"


def test_a_plan_is_compared_with_gpu_and_library() -> None:
    config = structs.replace(small_config(), device="cuda", backend="tensorrt", plan=GPU_PLAN)
    check_gpu(config, GPU, "tensorrt_lean 10.16.1")
    with pytest.raises(HearthError, match=r"TensorRT 10.16.1") as caught:
        check_gpu(config, GPU, "tensorrt 11.0.0")
    assert caught.value.code == "engine_incompatible"
    with pytest.raises(HearthError, match="compute capability"):
        check_gpu(config, structs.replace(GPU, compute_capability=(8, 9)), "tensorrt 10.16.1")
    check_gpu(small_config(), GPU, "onnxruntime 1")


SETTINGS = settings_of(
    images_in_flight_bytes=1 << 20,
    image_cache_bytes=1 << 21,
    encoder_nice=5,
    encoder_threads=6,
    threads=7,
    image_decode_timeout_s=8,
    image_decode_memory_bytes=1 << 27,
    restart_limit=2,
)
CONFIG = structs.replace(simulated_config(capacity=400), num_deepstack_features=2)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    vision = structs.replace(config_like("qwen3_vl"), max_patches=64, position_side=4)
    (tmp_path / VISION_FOLDER).mkdir()
    (tmp_path / VISION_FOLDER / VISION_CONFIG_FILE).write_bytes(msgspec.json.encode(vision))
    return tmp_path


def test_a_model_of_text_alone_has_no_memory_for_pictures(tmp_path: Path) -> None:
    with ExitStack() as opened:
        assert open_vision_memory(SETTINGS, tmp_path, CONFIG, opened) is None
    plan = executor_plan(SETTINGS, tmp_path)
    assert plan.descriptors == ()
    assert runtime_options(SETTINGS).image_memory == 3 << 20, "for one that sees"


def test_the_memory_is_that_of_the_settings_and_of_the_tower(engine: Path) -> None:
    with ExitStack() as opened:
        vision_memory = open_vision_memory(SETTINGS, engine, CONFIG, opened)
        assert vision_memory is not None
        assert (vision_memory.pictures.size, vision_memory.embeddings.size) == (1 << 20, 1 << 21)
        assert vision_memory.token_bytes == 3 * CONFIG.hidden_size * 4
        arenas = vision_memory.arenas()
        largest = most_tokens(SETTINGS, CONFIG) * vision_memory.config.merge_size**2
        assert arenas.patches.take(largest * arenas.patch_bytes) is not None


def test_each_setting_reaches_the_encoder_and_both_processes_inherit_the_memory(
    engine: Path,
) -> None:
    with ExitStack() as opened:
        vision_memory = open_vision_memory(SETTINGS, engine, CONFIG, opened)
        assert vision_memory is not None
        plan = encoder_plan(SETTINGS, engine, "ab", vision_memory)
        executor = executor_plan(SETTINGS, engine, "ab", vision_memory)
        told = msgspec.to_builtins(plan.settings)
        assert told["own"] == msgspec.to_builtins(SETTINGS.encoder)
        assert (told["own"]["encoder_nice"], told["own"]["encoder_threads"]) == (5, 6)
        assert plan.descriptors == executor.descriptors == vision_memory.descriptors
        assert (plan.role, plan.epoch, executor.supervision.restart_limit) == ("encoder", "ab", 2)
        assert plan.supervision.restart_limit == sys.maxsize, (
            "text goes on however often it is lost"
        )
        for name in ("patches", "embeddings"):
            shared = msgspec.to_builtins(getattr(vision_memory, name).shared)
            assert told[name] == msgspec.to_builtins(executor.settings)[name] == shared
        assert told["pictures"] == msgspec.to_builtins(vision_memory.pictures.shared)


def test_an_image_has_half_of_the_longest_prompt_unless_a_setting_says_otherwise() -> None:
    assert most_tokens(Settings(), CONFIG) == 199
    assert most_tokens(settings_of(queue_tokens=100), CONFIG) == 50
    assert most_tokens(settings_of(image_tokens=16), CONFIG) == 16


def test_an_image_has_no_more_before_the_executor_is_there(engine: Path) -> None:
    settings = replaced(SETTINGS, image_tokens=16)
    with ExitStack() as opened:
        vision_memory = open_vision_memory(settings, engine, CONFIG, opened)
        assert vision_memory is not None
        assert vision_memory.prompt_images(cast("Any", None)).most_tokens == 16


def test_a_broken_configuration_of_a_tower_ends_a_start(engine: Path) -> None:
    (engine / VISION_FOLDER / VISION_CONFIG_FILE).write_text("{}")
    with ExitStack() as opened, pytest.raises(HearthError) as caught:
        open_vision_memory(SETTINGS, engine, CONFIG, opened)
    assert caught.value.code == "engine_corrupt"
