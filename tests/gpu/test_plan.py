"""A plan against ONNX Runtime, its graphs against its enqueues, and what bad plans get.

`HEARTH_TEST_PLAN` names the engine folder with the plan, `HEARTH_TEST_MODEL` the model it was
exported from.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hearth.runtime.config import FileRecord, LLMEngineRunnerConfig, load_config
from hearth.runtime.engine_folder import PLAN_FILE, write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.tensors.profiles import InferenceDims
from tests.gpu.plan_driver import PlanDriver
from tests.runtime.export.graph_driver import GraphDriver

PLAN, MODEL = os.environ.get("HEARTH_TEST_PLAN"), os.environ.get("HEARTH_TEST_MODEL")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not PLAN or not MODEL, reason="no plan is named by HEARTH_TEST_PLAN"),
]
PROMPTS = [[5, 60, 7, 80, 9, 11, 30], [40, 50, 6, 70], [21, 22], [9]]
STEPS = 24
SMALL_GAP = 0.05
OPEN = (
    "import sys; from pathlib import Path; from tests.gpu.plan_driver import PlanDriver; "
    "PlanDriver(Path(sys.argv[1]))"
)


@pytest.fixture(scope="module")
def driver() -> Iterator[PlanDriver]:
    made = PlanDriver(Path(str(PLAN)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, driver: PlanDriver) -> GraphDriver:
    folder = tmp_path_factory.mktemp("reference") / "engine"
    slots = driver.config.max_kv_cache_capacity
    export_model(Path(str(MODEL)), folder, ExportOptions(dialect="classic", capacity=slots))
    return GraphDriver(folder, len(PROMPTS), slots)


def test_greedy_rows_equal_those_of_onnx_runtime(
    driver: PlanDriver, reference: GraphDriver
) -> None:
    driver.filled[:] = 0
    rows, worst, gaps = [list(one) for one in PROMPTS], 0.0, []
    for _ in range(STEPS):
        want = np.stack([row[-1] for row in reference.step(rows)])
        have = driver.step(rows)
        worst = max(worst, float(np.abs(have - want).max() / np.abs(want).max()))
        best = want.argmax(-1)
        lost = np.take_along_axis(want, have.argmax(-1)[:, None], -1)[:, 0]
        gaps.extend((want.max(-1) - lost)[have.argmax(-1) != best].tolist())
        rows = [[int(token)] for token in best]
    print(f"largest relative error {worst:.2e}, gaps of diverging tokens {gaps}")  # noqa: T201 - what the run is for
    assert worst < 2e-2
    assert all(gap < SMALL_GAP for gap in gaps)


def test_rows_have_tables_and_features_of_their_own(
    driver: PlanDriver, reference: GraphDriver
) -> None:
    config, random = driver.config, np.random.default_rng(1)
    if not config.use_context_dependent_rope:
        pytest.skip("the plan's model takes no images")
    driver.filled[:] = reference.filled[:] = 0
    batch, width = len(PROMPTS), len(PROMPTS[0])
    kept = reference.rope
    angles = random.uniform(0, 9, kept["rope_cos"].shape).astype(np.float32)
    reference.rope = {"rope_cos": np.cos(angles), "rope_sin": np.sin(angles)}
    ids = random.integers(3, 90, (batch, width))
    features = {
        f"deepstack_embeds_{k}": random.normal(0, 1, (batch, width, config.hidden_size))
        for k in range(config.num_deepstack_features)
    }
    every = np.tile(np.arange(width), (batch, 1))
    want = reference.run(ids, every, every[:, -1:], **features)["logits"][:, 0]
    dims = driver.feed(ids.tolist())
    for name, array in (reference.rope | features).items():
        driver.put(name, array)
    driver.engine.run(driver.bindings(dims), driver.stream)
    have = driver.finish(ids.tolist(), dims)
    for name, table in kept.items():
        driver.put(name, table)
    for name, array in features.items():
        driver.put(name, np.zeros_like(array))
    reference.rope = kept
    assert np.abs(have - want).max() / np.abs(want).max() < 2e-2


def test_the_record_says_what_its_steps_take(driver: PlanDriver) -> None:
    plan = driver.config.plan
    assert plan is not None
    if plan.scratch_bytes is None:
        pytest.skip("the plan was not opened when it was built")
    assert plan.scratch_bytes == driver.engine.required_context_memory


def test_every_graph_replays_after_captures_switches_and_prefill(driver: PlanDriver) -> None:
    random = np.random.default_rng(0)
    driver.filled[:] = 0
    batches = driver.config.static_decode_batches
    for name, spec in driver._specs.items():
        if name.startswith(("k_cache", "v_cache")):
            shape = spec.resolve(driver.dims(max(batches), 1))
            driver.put(name, random.standard_normal(shape).astype(np.float32))
    steps = {
        size: [[int(one)] for one in random.integers(3, min(900, driver.config.vocab_size), size)]
        for size in batches
    }
    driver.filled[:] = random.integers(4, 60, driver.filled.size)
    expected, graphs = {}, {}
    for size, rows in steps.items():
        bindings = driver.bindings(driver.feed(rows))
        driver.engine.run(bindings, driver.stream)
        expected[size] = driver.outputs(driver.dims(size, 1))
        graphs[size] = driver.engine.capture(bindings, driver.stream)
    for size in (*batches, *reversed(batches)):
        prompt = driver.feed([[3, 4, 5, 6], [7, 8]][: max(1, size // 2)])
        driver.engine.run(driver.bindings(prompt), driver.stream)
        driver.feed(steps[size])
        graphs[size].launch(driver.stream)
        for name, array in driver.outputs(driver.dims(size, 1)).items():
            np.testing.assert_array_equal(array, expected[size][name], err_msg=f"{size} {name}")
    for graph in graphs.values():
        graph.close()


def test_a_prefill_step_that_cannot_be_captured_leaves_the_stream_usable(
    driver: PlanDriver,
) -> None:
    driver.filled[:] = 0
    rows = [[3, 4, 5, 6]]
    dims = driver.feed(rows)
    bindings = driver.bindings(dims)
    driver.engine.run(bindings, driver.stream)
    before = driver.outputs(dims)["logits"]
    with suppress(HearthError):
        driver.engine.capture(bindings, driver.stream).close()
    driver.engine.run(bindings, driver.stream)
    np.testing.assert_array_equal(driver.outputs(dims)["logits"], before)


def test_a_shape_out_of_the_profile_names_the_binding_and_the_range(driver: PlanDriver) -> None:
    slots = driver.config.max_kv_cache_capacity
    small = driver.bindings(InferenceDims.decode(1, slots))
    wrong = tuple(
        one._replace(shape=(2, *one.shape[1:])) if one.name == "inputs_embeds" else one
        for one in small
    )
    driver.engine.use_profile(1, driver.stream)
    with pytest.raises(HearthError, match=r"inputs_embeds has shape .* serves") as error:
        driver.engine.run(wrong, driver.stream)
    assert error.value.code == "invalid_value"
    driver.engine.run(small, driver.stream)
    driver.stream.synchronize()


@pytest.mark.parametrize(
    ("field", "value"),
    [("tensorrt_version", "99.0.0"), ("gpu_name", "Other"), ("compute_capability", "5.0")],
)
def test_a_plan_for_something_else_is_refused(
    driver: PlanDriver, tmp_path: Path, field: str, value: str
) -> None:
    assert driver.config.plan is not None
    record = msgspec.structs.replace(driver.config.plan, **{field: value})
    _link(tmp_path, msgspec.structs.replace(driver.config, plan=record))
    with pytest.raises(HearthError) as error:
        PlanDriver(tmp_path)
    assert (error.value.code, error.value.field) == ("engine_incompatible", field)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_cut_plan_is_refused(driver: PlanDriver, tmp_path: Path, share: float) -> None:
    _link(tmp_path, driver.config)
    whole = (Path(str(PLAN)) / PLAN_FILE).read_bytes()
    (tmp_path / PLAN_FILE).unlink()
    (tmp_path / PLAN_FILE).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(HearthError) as error:
        PlanDriver(tmp_path)
    assert error.value.code == "engine_corrupt"


def test_a_plan_of_noise_is_refused_by_the_library(driver: PlanDriver, tmp_path: Path) -> None:
    # In a process of its own: what the library does with noise is not ours to promise.
    _link(tmp_path, driver.config)
    (tmp_path / PLAN_FILE).unlink()
    (tmp_path / PLAN_FILE).write_bytes(bytes(5000))
    config = load_config(tmp_path)
    files = {**config.files, PLAN_FILE: FileRecord(5000, "")}
    write_config(tmp_path, msgspec.structs.replace(config, files=files))
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "engine_corrupt" in done.stderr


def _link(folder: Path, config: LLMEngineRunnerConfig) -> None:
    for path in Path(str(PLAN)).iterdir():
        if path.name == PLAN_FILE:
            (folder / path.name).symlink_to(path.resolve())
        elif path.is_file():
            shutil.copy(path, folder / path.name)
    write_config(folder, config)
