"""Towers parsed and built by a real builder, which needs no GPU."""

from pathlib import Path
from typing import Any

import pytest

from hearth.runtime.engine_folder import MODEL_FILE, PLAN_FILE
from hearth.runtime.executor.engine import IOTensor
from hearth.runtime.executor.engine_executor import check_bindings
from hearth.runtime.executor.tensorrt_library import numpy_dtype_of
from hearth.runtime.export.options import Dialect, ExportOptions, PlanOptions, TargetType
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.tensors.registry import build_registry_for_tower, build_tower_profiles
from hearth.runtime.vision_config import VISION_FOLDER
from tests.vision_models import FAMILIES, Family, write_vision_model

rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")
pytestmark = [pytest.mark.rtx, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PLAN = PlanOptions(builder="tensorrt_rtx")
# Heads of 72 and 80 elements, as those of Qwen3-VL and Qwen2.5-VL, and a layer of each sort.
SIZES: dict[Family, dict[str, Any]] = {
    "qwen3_vl": {"hidden_size": 144, "depth": 2, "deepstack_visual_indexes": [0]},
    "qwen2_5_vl": {"hidden_size": 160, "depth": 2, "fullatt_block_indexes": [1]},
    "idefics3": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize(
    ("dialect", "dtype", "served"),
    [("native", "float16", "native"), ("native", "float32", "classic")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_builder_takes_a_tower(
    tmp_path: Path, family: Family, dialect: Dialect, dtype: TargetType, served: str
) -> None:
    """There is no fused attention for float32, where primitive operators take its place."""
    source = write_vision_model(tmp_path / "m", family, vision=SIZES[family])
    options = ExportOptions(dialect=dialect, dtype=dtype, plan=PLAN)
    config = write_vision(source, tmp_path, options)
    assert config is not None
    assert (config.dialect, config.dtype, config.backend) == (served, dtype, "tensorrt")
    assert config.plan is not None
    assert config.device == "cuda"
    folder = tmp_path / VISION_FOLDER
    assert (folder / PLAN_FILE).stat().st_size > 10_000
    assert not (folder / MODEL_FILE).exists()


@pytest.mark.parametrize("dialect", ["native", "classic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bindings_and_profiles_are_those_of_the_registry(
    tmp_path: Path, family: Family, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("hearth.runtime.export.tensorrt.plan.run_builder",
                        lambda _python, job, _progress=None: _inspect(job, seen))  # fmt: skip
    source = write_vision_model(tmp_path / "m", family)
    options = ExportOptions(dialect=dialect, dtype="float16", plan=PLAN)
    config = write_vision(source, tmp_path, options)
    assert config is not None
    (found,) = seen
    registry, (profile,) = build_registry_for_tower(config), build_tower_profiles(config)
    assert {one.name for one in found["tensors"]} == {spec.name for spec in registry.specs}
    check_bindings(found["tensors"], registry)
    (shapes,) = found["profiles"]
    for name, sizes in shapes.items():
        spec = registry.get(name)
        assert spec is not None
        assert [tuple(one) for one in sizes] == [spec.resolve(dims) for dims in profile]


def _inspect(job: dict[str, Any], seen: list[dict[str, Any]]) -> dict[str, Any]:
    logger = rtx.Logger()
    strict = 1 << int(rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = rtx.Builder(logger).create_network(strict)
    assert rtx.OnnxParser(network, logger).parse_from_file(job["graph"])
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    tensors = tuple(
        IOTensor(
            one.name,
            "input" if one in inputs else "output",
            numpy_dtype_of(one.name, one.dtype),
            tuple(None if size < 0 else size for size in one.shape),
        )
        for one in (*inputs, *outputs)
    )
    seen.append({"tensors": tensors, "profiles": job["profiles"]})
    Path(job["output"]).write_bytes(b"plan")
    facts = {"module": "tensorrt_rtx", "tensorrt_version": rtx.__version__}
    return {**facts, "gpu_name": "", "compute_capability": ""}
