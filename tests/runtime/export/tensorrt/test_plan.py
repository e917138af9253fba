import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from msgspec import structs

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.engine_folder import DATA_FILE, MODEL_FILE, PLAN_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export.draft_config import DraftOptions
from hearth.runtime.export.options import (
    Feature,
    PlanOptions,
    check_plan_options,
    has_feature,
    resolve_decode_batches,
)
from hearth.runtime.export.tensorrt import plan
from hearth.runtime.export.tensorrt.plan import (
    NoAttentionKernelError,
    build_or_fall_back,
    graph_digest,
    run_builder,
    settle_options,
)
from tests.references import NAMES, reference_folder, reference_logits
from tests.runtime.engine_configs import small_config
from tests.runtime.export.drafts import compare_draft
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.image_rows import compare_images
from tests.runtime.export.tensorrt.graphs import (
    CAPACITY,
    CHUNK,
    PLAN,
    WIDE,
    export_graph,
    graph_options,
    small_draft,
)
from tests.vision_models import FAMILIES, Family, write_vision_model

CONFIG = structs.replace(
    small_config(), backend="tensorrt", device="cuda", dtype="float16", static_decode_batches=(1, 4)
)
FACTS = {
    "module": "tensorrt",
    "tensorrt_version": "10.15.0",
    "gpu_name": "A",
    "compute_capability": "9.0",
}


class Builds:
    """Stands for the builder process; fails for the native dialect when `unfused`.

    `facts` are what it says of a build, `opening` what it raises when a plan is to be opened.
    """

    def __init__(self, folder: Path, version: str = "10.15.0", *, unfused: bool = False) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.facts = FACTS
        self.opening: HearthError | None = None
        self._folder, self._version, self._unfused = folder, version, unfused

    def __call__(self, _python: str, job: dict[str, Any], _progress: Any = None) -> dict[str, Any]:
        if job.get("probe"):
            return {"module": job["probe"][0], "tensorrt_version": self._version}
        if job.get("measure"):
            assert job["measure"] == str(self._folder / PLAN_FILE)
            if self.opening is not None:
                raise self.opening
            return {"scratch_bytes": 640}
        self.jobs.append(job)
        if self._unfused and (self._folder / MODEL_FILE).read_bytes() == b"native":
            raise NoAttentionKernelError("model_unsupported", "no kernel")
        (self._folder / PLAN_FILE).write_bytes(b"plan")
        return self.facts


def write(folder: Path, config: LLMEngineRunnerConfig) -> None:
    (folder / MODEL_FILE).write_bytes(config.dialect.encode())
    (folder / DATA_FILE).write_bytes(b"weights")


def build(folder: Path, builds: Builds, monkeypatch: pytest.MonkeyPatch) -> LLMEngineRunnerConfig:
    monkeypatch.setattr(plan, "run_builder", builds)
    write(folder, CONFIG)
    return build_or_fall_back(folder, CONFIG, PlanOptions(), lambda config: write(folder, config))


def test_the_plan_takes_the_place_of_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, CONFIG)
    digest = graph_digest(tmp_path)
    config = build(tmp_path, Builds(tmp_path), monkeypatch)
    assert [one.name for one in tmp_path.iterdir()] == [PLAN_FILE]
    assert config.plan is not None
    assert (config.plan.graph_sha256, config.plan.gpu_name) == (digest, "A")
    assert config.dialect == "native"


def test_a_plan_is_recorded_with_what_its_steps_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds(tmp_path)

    def recorded() -> int | None:
        plan = build(tmp_path, builds, monkeypatch).plan
        assert plan is not None
        return plan.scratch_bytes

    assert recorded() == 640
    builds.opening = HearthError("out_of_memory", "another engine is running")
    assert recorded() is None
    builds.opening = HearthError("model_unsupported", "the builder was ended by signal 6")
    with pytest.raises(HearthError, match="signal 6"):
        recorded()
    builds.facts = FACTS | {"gpu_name": ""}
    assert recorded() is None


def test_the_builder_is_told_the_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Builds(tmp_path)
    build(tmp_path, builds, monkeypatch)
    (job,) = builds.jobs
    context, one, four = job["profiles"]
    assert context["inputs_embeds"] == [[1, 1, 16], [4, 8, 16], [4, 16, 16]]
    assert one["k_cache_1"] == [[1, 1, 64, 8]] * 3
    assert four["last_token_ids"] == [[4, 1]] * 3
    assert "rope_cos" not in context


def test_without_a_fused_attention_the_graph_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds(tmp_path, unfused=True)
    config = build(tmp_path, builds, monkeypatch)
    assert (config.dialect, config.use_trt_native_ops, len(builds.jobs)) == ("classic", False, 2)


@pytest.mark.parametrize(
    ("version", "dialect", "suited"),
    [
        ("8.6.1", "classic", PlanOptions(builder="tensorrt", kv_cache_dtype="float32")),
        ("10.3.0", "classic", PlanOptions(builder="tensorrt")),
        ("10.15.1", "native", PlanOptions(builder="tensorrt")),
    ],
)
def test_auto_is_what_suits_the_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, dialect: str, suited: PlanOptions
) -> None:
    monkeypatch.setattr(plan, "run_builder", Builds(tmp_path, version))
    options = structs.replace(
        graph_options("native", "float16"), dialect="auto", plan=PlanOptions()
    )
    settled = settle_options(options)
    assert (settled.dialect, settled.plan) == (dialect, suited)


def test_without_any_builder_both_are_named_and_how_to_get_one(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    bare = PlanOptions(python=str(python))
    options = structs.replace(graph_options("native", "float16"), plan=bare)
    with pytest.raises(HearthError, match=r"tensorrt cannot .*tensorrt_rtx cannot") as error:
        settle_options(options)
    assert (error.value.code, error.value.field) == ("unsupported_option", "backend")
    assert "pip install 'tensorrt-rtx-cu13-bindings" in error.value.message
    assert "--builder-python" in error.value.message
    with pytest.raises(HearthError, match="no_such") as error:
        settle_options(structs.replace(options, plan=PlanOptions(python="no_such")))
    assert error.value.field == "builder_python"


def test_wide_caches_are_for_the_classic_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "run_builder", Builds(tmp_path))
    wide = PlanOptions(kv_cache_dtype="float32")
    native = structs.replace(graph_options("native", "float16"), plan=wide)
    assert settle_options(structs.replace(native, dialect="auto")).dialect == "classic"
    with pytest.raises(HearthError, match="choose classic") as error:
        settle_options(native)
    assert (error.value.code, error.value.field) == ("unsupported_option", "kv_cache_dtype")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dialect": "native"}, "dialect"),
        ({"dialect": "auto", "dtype": "bfloat16"}, "dtype"),
        ({"dialect": "auto", "draft": DraftOptions(folder=Path("draft"))}, "draft"),
    ],
)
def test_what_an_old_builder_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr(plan, "run_builder", Builds(tmp_path, "8.6.1"))
    options = structs.replace(graph_options("native", "float16"), plan=PlanOptions(), **changes)
    with pytest.raises(HearthError) as error:
        settle_options(options)
    assert (error.value.code, error.value.field) == ("unsupported_option", field)


def test_rtx_has_no_plans_for_later_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "run_builder", Builds(tmp_path, "1.7.1.116"))
    asked = PlanOptions(builder="tensorrt_rtx", version_compatible=True)
    options = structs.replace(graph_options("native", "float16"), plan=asked)
    with pytest.raises(HearthError, match="its own version alone") as error:
        settle_options(options)
    assert (error.value.code, error.value.field) == ("unsupported_option", "version_compatible")


def test_a_graph_for_onnx_runtime_asks_no_builder() -> None:
    options = structs.replace(graph_options("native", "float16"), plan=None)
    assert settle_options(options) is options


class TestRunBuilder:
    def script(self, folder: Path, text: str) -> str:
        path = folder / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def test_progress_is_passed_on_and_noise_is_not(self, tmp_path: Path) -> None:
        heard: list[Any] = []
        python = self.script(
            tmp_path,
            'echo noise; echo \'{"event": "progress", "stage": "s", "done": 1, "total": 2}\'; '
            'echo \'{"event": "built", "seconds": 3}\'',
        )
        facts = run_builder(python, {}, lambda *one: heard.append(one))
        assert facts["seconds"] == 3
        assert heard == [("plan: s", 1, 2)]

    @pytest.mark.parametrize(
        ("kind", "code"),
        [
            ("no_gpu", "unsupported_option"),
            ("out_of_memory", "out_of_memory"),
            ("unwritable", "invalid_value"),
            ("parse", "model_unsupported"),
        ],
    )
    def test_a_failure_gets_a_code(self, tmp_path: Path, kind: str, code: str) -> None:
        event = f'{{"event": "failed", "kind": "{kind}", "message": "so"}}'
        with pytest.raises(HearthError, match="so") as error:
            run_builder(self.script(tmp_path, f"echo '{event}'; exit 1"), {})
        assert error.value.code == code

    def test_a_builder_that_dies_is_quoted(self, tmp_path: Path) -> None:
        with pytest.raises(HearthError, match="without a word, exit code 139: at; segfault"):
            run_builder(self.script(tmp_path, "echo at >&2; echo segfault >&2; exit 139"), {})
        with pytest.raises(
            HearthError, match=r"was ended by signal 11 \(Segmentation fault\): here"
        ):
            run_builder(self.script(tmp_path, "echo here >&2; kill -SEGV $$"), {})

    def test_a_builder_ends_with_the_export_that_is_killed(self, tmp_path: Path) -> None:
        (tmp_path / "endless.py").write_text(
            "import os, signal\n"
            "with open(os.environ['STARTED'], 'w') as fifo:\n"
            "    fifo.write('here')\n    fifo.flush()\n    signal.pause()\n"
        )
        job = "{'probe': ['endless']}"
        export = f"import sys; from {run_builder.__module__} import run_builder as run; "
        path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[4])])
        fifo = tmp_path / "started"
        os.mkfifo(fifo)
        environ = {**os.environ, "PYTHONPATH": path, "STARTED": str(fifo)}
        command = [sys.executable, "-c", f"{export} run(sys.executable, {job})"]
        with subprocess.Popen(command, env=environ) as process, fifo.open() as heard:
            assert heard.read(4) == "here"
            process.kill()
            # The other end is closed when the builder is gone.
            assert heard.read() == ""

    def test_a_python_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(HearthError) as error:
            run_builder(str(tmp_path / "none"), {})
        assert (error.value.code, error.value.field) == ("unsupported_option", "builder_python")


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))],
)
def test_decode_batches_are_powers_of_two_and_the_largest(
    largest: int, sizes: tuple[int, ...]
) -> None:
    assert resolve_decode_batches(PlanOptions(), largest) == sizes


def test_chosen_decode_batches_are_taken() -> None:
    options = PlanOptions(decode_batches=(1, 8))
    check_plan_options(options, 8)
    assert resolve_decode_batches(options, 8) == (1, 8)


@pytest.mark.parametrize("sizes", [(1, 4), (8, 1), (0, 8), (1, 1, 8), (16,)])
def test_decode_batches_must_rise_to_the_largest(sizes: tuple[int, ...]) -> None:
    with pytest.raises(HearthError, match="largest batch, 8"):
        check_plan_options(PlanOptions(decode_batches=sizes), 8)


def test_numbers_without_meaning_are_refused() -> None:
    for options in (
        PlanOptions(optimization_level=6),
        PlanOptions(workspace_bytes=-1),
        PlanOptions(kv_cache_dtype="float16"),  # type: ignore[arg-type] # as a caller may
    ):
        with pytest.raises(HearthError):
            check_plan_options(options, 8)


FEATURES: tuple[Feature, ...] = ("native dialect", "bfloat16", "drafts")


@pytest.mark.parametrize(
    ("version", "can"),
    [
        ("8.6.1", (False, False, False)),
        ("9.3.0", (False, True, False)),
        ("10.14.1", (False, True, True)),
        ("10.15.1.2", (True, True, True)),
    ],
)
def test_what_a_version_can_do(version: str, can: tuple[bool, bool, bool]) -> None:
    assert tuple(has_feature(one, "tensorrt", version) for one in FEATURES) == can


def test_rtx_numbers_its_versions_otherwise() -> None:
    assert all(has_feature(one, "tensorrt_rtx", "1.7.1") for one in FEATURES)


LAYERS = 3


@pytest.mark.parametrize("name", NAMES)
def test_the_primitive_graph_gives_the_reference_logits(tmp_path: Path, name: str) -> None:
    export_graph(name, tmp_path / "engine", "classic", "float32")
    rows = reference_logits(name)
    driver = GraphDriver(tmp_path / "engine", len(rows), CAPACITY)
    for row, logits in zip(rows, run_rows(driver, rows, CHUNK), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=2e-4)
        assert logits.argmax(-1).tolist() == row.logits.argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_primitive_graphs_of_models_that_take_images_agree(
    tmp_path: Path, family: Family
) -> None:
    model, target = write_vision_model(tmp_path / "m", family), tmp_path / "engine"
    export_graph(model, target, "classic", "float32", small_draft(model, tmp_path))
    compare_images(target, family, CHUNK, 2e-4)
    compare_draft(target, model, 2e-4)
    onnx.checker.check_model(target / MODEL_FILE, full_check=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_primitive_graph_is_valid_onnx(tmp_path: Path, name: str) -> None:
    export_graph(name, tmp_path / "engine", "classic", "float16")
    onnx.checker.check_model(tmp_path / "engine" / MODEL_FILE, full_check=True)


def test_wide_caches_give_the_logits_of_narrow_ones(tmp_path: Path) -> None:
    rows = reference_logits("qwen3")
    logits = []
    for options in (PLAN, WIDE):
        target = tmp_path / options.kv_cache_dtype
        export_graph("qwen3", target, "classic", "float16", plan=options)
        onnx.checker.check_model(target / MODEL_FILE, full_check=True)
        driver = GraphDriver(target, len(rows), CAPACITY)
        logits.append(run_rows(driver, rows, CHUNK))
    graph = ir.load(target / MODEL_FILE).graph
    for value in (*graph.inputs, *graph.outputs):
        if "_cache_" in str(value.name):
            assert value.dtype == ir.DataType.FLOAT
    # A row is rounded to half precision before it is kept wide, so nothing differs.
    for narrow, wide in zip(*logits, strict=True):
        np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("name", ["qwen3", "llama_biased"])
def test_the_primitive_graphs_of_speculation_take_trees(tmp_path: Path, name: str) -> None:
    target = tmp_path / "engine"
    export_graph(name, target, "classic", "float32", small_draft(name, tmp_path))
    rows = reference_logits(name)
    driver = GraphDriver(target, len(rows), CAPACITY)
    for row, logits in zip(rows, run_rows(driver, rows, CHUNK), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=2e-4)
    compare_draft(target, reference_folder(name), 2e-4)
    for folder in (target, target / "draft"):
        onnx.checker.check_model(folder / MODEL_FILE, full_check=True)


@pytest.mark.parametrize("dialect", ["classic", "native"])
def test_caches_and_rotary_tables_have_fixed_sizes(tmp_path: Path, dialect: str) -> None:
    export_graph("qwen3", tmp_path / "engine", "native" if dialect == "native" else "classic",
                 "bfloat16")  # fmt: skip
    graph = ir.load(tmp_path / "engine" / MODEL_FILE).graph
    for value in graph.inputs:
        assert value.shape is not None
        if "cache" in str(value.name) and value.name != "kvcache_start_index":
            assert value.shape[2] == CAPACITY
        if str(value.name).startswith("rope"):
            assert value.shape[0] == CAPACITY


def test_queries_and_keys_are_normed_and_turned_together(tmp_path: Path) -> None:
    export_graph("qwen3", tmp_path / "engine", "classic", "float16")
    graph = ir.load(tmp_path / "engine" / MODEL_FILE).graph
    counts = Counter(node.op_type for node in graph)
    assert counts["Sqrt"] == 3 * LAYERS + 1
    assert counts["Softmax"] == LAYERS
    assert "Pow" not in counts
